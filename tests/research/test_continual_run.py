"""Runs: what they write, and that nothing is lost or counted twice however they are stopped."""

import json
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.research.continual.__main__ import main
from benchmarks.research.continual.answering.stored_answers import StoredAnswers
from benchmarks.research.continual.methods import METHODS, Artifact
from benchmarks.research.continual.stream import Run, run_stream
from server.demo import CHECKPOINT
from tests.research.small_streams import ORDER, command, own_folder

pytestmark = pytest.mark.usefixtures("without_report")

NOTHING = Artifact("none", None, 0, {})
MEASURED = ("seconds", "questions")  # of a matrix: what an interruption changes


def timeless(matrix: dict[str, Any]) -> dict[str, Any]:
    """A matrix without what a clock has measured."""
    kept = {name: value for name, value in matrix.items() if name not in MEASURED}
    return kept | {"reports": [{k: v for k, v in report.items() if k != "seconds"} for report in matrix["reports"]]}


def test_a_run_writes_matrix_predictions_bytes_and_seconds(finished, suite):
    matrix = json.loads((own_folder(finished) / "matrix.json").read_bytes())
    assert matrix["order"] == list(ORDER)
    assert matrix["complete"]
    assert [len(row) for row in matrix["accuracy"]] == [1, 2]
    assert len(matrix["base"]) == len(matrix["seconds"]) == 2
    for number, name in enumerate(ORDER):
        lines = (own_folder(finished) / f"{number:02d}-{name}" / "predictions.jsonl").read_text().splitlines()
        predictions = [json.loads(line) for line in lines]
        asked = [e.id for task in suite.tasks[: number + 1] for e in task.test] + [e.id for e in suite.base.test]
        assert [p["id"] for p in predictions] == asked
        names, accuracies = [*ORDER[: number + 1], "base"], [*matrix["accuracy"][number], matrix["base"][number]]
        for task, accuracy in zip(names, accuracies, strict=True):
            rights = [p["score"] for p in predictions if p["task"] == task]
            assert accuracy == pytest.approx(sum(rights) / len(rights))
    assert matrix["metrics"]["AP"] == pytest.approx(sum(matrix["accuracy"][1]) / 2)
    assert "<html" in (finished / "report.html").read_text()


@pytest.fixture
def out(finished, tmp_path) -> Path:
    """A copy of the finished run, in which the last task is not done."""
    out = shutil.copytree(finished, tmp_path / "out")
    (own_folder(out) / "01-field" / "result.json").unlink()
    return out


def test_killed_between_learning_and_answering_it_goes_on_and_counts_nothing_twice(out, data):
    before = json.loads((own_folder(out) / "matrix.json").read_bytes())
    task = own_folder(out) / "01-field"
    adapter = task / "state" / "adapter" / "adapter_model.safetensors"
    written = adapter.stat().st_mtime_ns
    assert main(command(data, out)) == 0
    assert adapter.stat().st_mtime_ns == written  # learned once
    after = json.loads((own_folder(out) / "matrix.json").read_bytes())
    assert timeless(after) == timeless(before)
    assert len((task / "predictions.jsonl").read_text().splitlines()) == 6 + 6 + 9


def test_a_folder_of_another_configuration_is_refused(finished, data, capsys):
    assert main(command(data, finished, "--test-limit", "3")) == 2
    assert "test_limit: 256 there, 3 here" in capsys.readouterr().err
    assert main(command(data, finished, "--answer", "http")) == 2
    assert "'by': 'offline'" in capsys.readouterr().err
    assert main(command(data, finished, "--answer", "http", "--serve-args", "--dtype", "bfloat16")) == 2
    assert "'serve_args': ['--dtype', 'bfloat16']" in capsys.readouterr().err
    assert main(command(data, finished, "--set", "steps=3")) == 2
    assert "steps: 2 there, 3 here" in capsys.readouterr().err


@pytest.mark.parametrize(("keep", "left"), [("all", [True, True]), ("last", [False, True]), ("none", [False, False])])
def test_states_that_nothing_needs_are_removed(keep, left, out, data):
    folders = [own_folder(out) / name for name in ("00-guild", "01-field")]
    for again in range(2):  # without its states, a finished stream stays finished
        assert main(command(data, out, "--keep-states", keep)) == 0
        assert [(folder / "state").exists() for folder in folders] == left, again
        assert not any((folder / "state.tmp").exists() for folder in folders)


def test_a_stream_that_cannot_be_run_does_not_stop_the_others(out, data, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.lora_adapter.layers_of_gate", lambda backbone: (0,))  # too few bytes for rank 1
    assert main(command(data, out, "--budget", "1", "32")) == 2
    said = capsys.readouterr()
    assert "1 of 2 streams did not end: lora_replay, budget 1, seed 0: a LoRA of rank 1 takes 44800 bytes" in said.err
    assert [row["budget"] for row in json.loads(said.out)["results"]] == [32]


@dataclass(frozen=True)
class Counting:
    """Answers with a question's own digest, and keeps the questions."""

    asked: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def prepare(self, artifact, state):
        return self

    def answers(self, examples):
        time.sleep(self.seconds)
        self.asked.extend(example.source_digest for example in examples)
        return [example.source_digest for example in examples]


def test_equal_questions_to_equal_artifacts_are_asked_once(suite, tmp_path):
    """The untouched model, over two seeds and two budgets, is asked each question of both tasks and the base once."""
    answerer = Counting()
    for budget, seed in ((32, 0), (32, 1), (64, 0)):
        done = run_stream(Run(suite, METHODS["no_memory"], CHECKPOINT, budget, seed, tmp_path), answerer)
        assert [row["answered"] for row in done["questions"]] == [6 + 9, 6 + 6 + 9]
        assert [row["asked"] for row in done["questions"]] == ([15, 6] if (budget, seed) == (32, 0) else [0, 0])
    assert len(answerer.asked) == len(set(answerer.asked)) == 6 + 6 + 9


@pytest.fixture
def state(tmp_path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


def test_an_answer_that_a_kill_cut_short_is_asked_again_and_the_others_are_not(suite, state, tmp_path):
    known = StoredAnswers(tmp_path / "answers", Counting())
    examples = suite.tasks[0].test
    expected, _ = known.answers(NOTHING, state, examples)
    (file,) = (tmp_path / "answers").iterdir()
    whole = file.read_bytes()
    for cut in (1, 20):
        file.write_bytes(whole[:-cut])
        assert known.answers(NOTHING, state, examples) == (expected, 1)
        assert sorted(file.read_bytes().splitlines()) == sorted(whole.splitlines())
