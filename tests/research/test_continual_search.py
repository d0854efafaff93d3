"""The search: all combinations of a grid, on validation questions alone."""

import json
from pathlib import Path

import pytest

from benchmarks.research.continual.__main__ import main, parse
from benchmarks.research.continual.search import grid_trials, methods_of_trials, searched_suite
from inducekv_vllm.errors import ConfigError
from tests.research.small_streams import ORDER


def test_the_searched_suite_holds_no_test_question(suite):
    searched = searched_suite(suite, 1, 5, 3, 2)
    (task,) = searched.tasks
    assert (task.train, task.test) == (suite.tasks[0].train[:5], suite.tasks[0].validation[:3])
    assert searched.base.test == suite.base.validation[:2]
    for tasks in (0, 3):
        with pytest.raises(ConfigError, match=f"has 2 tasks, a search over {tasks}"):
            searched_suite(suite, tasks, 5, 4, 3)


def test_a_grid_is_every_combination_of_its_values():
    assert grid_trials(["modules=all,o_proj", "learning_rate=0.1,2e-3"]) == (
        ("modules=all", "learning_rate=0.1"),
        ("modules=all", "learning_rate=2e-3"),
        ("modules=o_proj", "learning_rate=0.1"),
        ("modules=o_proj", "learning_rate=2e-3"),
    )
    for wrong in (["right"], ["=1"], ["right=1,"], ["right=1", "right=2"]):
        with pytest.raises(ConfigError, match=r"needs KEY=V1,V2 with each KEY once, found '"):
            grid_trials(wrong)
    arguments = ["--method", "lora", "--tasks", "1", "--out", "x", "--set", "steps=7", "--grid", "learning_rate=1,2"]
    trials = methods_of_trials(parse(["search", *arguments]))
    assert [(lora.steps, lora.learning_rate) for (lora,) in trials] == [(7, 1.0), (7, 2.0)]


def test_the_best_trial_wins_and_no_test_question_is_ever_read(data, model, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["search", "--order", *ORDER, "--model", str(model), "--data", str(data), "--out", str(out)]
    arguments += ["--method", "knn_copier", "no_memory", "--grid", "k=1,3", "--jobs", "1"]
    assert main([*arguments, "--tasks", "2"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((out / "tuned.json").read_bytes()) == printed
    trials = printed["methods"]["knn_copier"]["trials"]
    assert [trial["settings"] for trial in trials] == [["k=1"], ["k=3"]]
    for number, trial in enumerate(trials):
        folder = out / f"trial-{number}" / "knn_copier" / "budget-32" / "seed-0"
        matrix = json.loads((folder / "matrix.json").read_bytes())
        assert matrix["settings"]["k"] == (1, 3)[number]
        assert trial["AP"] == pytest.approx(sum(matrix["accuracy"][-1]) / 2, abs=1e-6)
        asked = [json.loads(line)["id"] for path in folder.rglob("predictions.jsonl") for line in path.open()]
        assert asked
        assert all("/validation" in name for name in asked)
    best = max(trials, key=lambda trial: trial["AP"])  # the first of equal ones
    assert printed["methods"]["knn_copier"]["settings"] == best["settings"]
    written = {path: path.stat().st_mtime_ns for path in out.rglob("result.json")}
    assert main([*arguments, "--tasks", "2"]) == 0  # nothing is made again
    assert {path: Path(path).stat().st_mtime_ns for path in written} == written
    assert main([*arguments, "--tasks", "1"]) == 2  # the folder is of another configuration
    assert "tasks: ['guild', 'field'] there" in capsys.readouterr().err
