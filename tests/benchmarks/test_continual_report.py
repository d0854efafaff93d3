"""The page and the JSON file of a folder made by hand: the demo world, two tasks, a few questions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from benchmarks.continual.__main__ import main
from benchmarks.continual.metrics import accuracy_matrix, summary
from benchmarks.continual.report.command import write_report
from benchmarks.continual.report.commands import read_commands, record_command
from benchmarks.continual.results import weights_digest
from benchmarks.continual.suites import Suite
from benchmarks.continual.suites.demo import load
from benchmarks.demo.model import CHECKPOINT
from inducekv_vllm.errors import ConfigError

SIZES = {"train": 4, "validation": 2, "test": 4}
BASE_SIZES = {"train": 9, "validation": 9, "test": 9}
ORDER = ("guild", "digit")
PNG = b"\x89PNG\r\n\x1a\n"
# Of four questions of each of the two tasks, how many are right after each task; of nine base questions, how many.
RIGHT = {
    "no_memory": [[0], [0, 1], 9],
    "lora_replay": [[4], [3, 4], 5],
    "refined": [[4], [4, 3], 9],
    "refined_no_gate": [[3], [2, 2], 4],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    load(folder, SIZES, BASE_SIZES)
    return folder


@pytest.fixture(scope="module")
def suite(data: Path) -> Suite:
    return load(data, SIZES, BASE_SIZES).ordered(ORDER)


def write_stream(out: Path, suite: Suite, method: str, seed: int, right: Sequence[Any]) -> None:
    """One complete stream with budget 32, as `stream` leaves it."""
    *rows, base = right
    accuracy = [[count / 4 for count in row] for row in rows]
    folder = out / method / "budget-32" / f"seed-{seed}"
    for number, row in enumerate(rows):
        lines = []
        for task, count in zip((*suite.tasks, suite.base), [*row, *[0] * (1 - number), base], strict=True):
            for place, example in enumerate(task.test):
                answer = example.answer if place < count else f"{method} says"
                line = {"task": task.name, "id": example.id, "expected": example.answer, "answer": answer}
                lines.append({**line, "right": place < count})
        task_folder = folder / f"{number:02d}-{ORDER[number]}"
        task_folder.mkdir(parents=True)
        (task_folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    matrix = {
        "suite": "demo",
        "method": method,
        "settings": {"name": method, "steps": 7, "learning_rates": [0.001]},
        "budget": 32,
        "seed": seed,
        "order": list(ORDER),
        "complete": True,
        "accuracy": accuracy,
        "base": [base / 9] * 2,
        "stored_bytes": [0 if method == "no_memory" else 1024] * 2,
        "anchor_bytes": [10, 2048],
        "questions": [],
        "seconds": [{"learn": 1.23456, "evaluate": 2.0}] * 2,
        "metrics": summary(accuracy_matrix(accuracy), [base / 9] * 2),
        "reports": [{"history": [{"step": 0}]}] * 2,
    }
    (folder / "matrix.json").write_text(json.dumps(matrix))


@pytest.fixture
def out(tmp_path: Path, data: Path, suite: Suite) -> Path:
    folder = tmp_path / "out"
    for method, right in RIGHT.items():
        for seed in (0, 1):
            write_stream(folder, suite, method, seed, right)
    configuration = {
        "suite": "demo",
        "data": suite.digest(),
        "order": list(ORDER),
        "model": {"name": CHECKPOINT.name, "weights": weights_digest(CHECKPOINT)},
        "split": "test",
        "train_limit": 512,
        "test_limit": 256,
        "base_limit": 270,
        "answer": {"by": "http", "server": "own"},
        "where": {"suite": "demo", "data": str(data), "model": str(CHECKPOINT)},
    }
    (folder / "run.json").write_text(json.dumps(configuration))
    record_command(folder, ["python", "-m", "benchmarks.continual", "run", "--out", str(folder)])
    (folder / "diagnostics").mkdir()
    found = {"diagnostic": "hit_rate", "source": "Retrieval Quality", "says": "It hits <often>.", "bins": [1, 2]}
    found |= {"method": "refined", "budget": 32}
    (folder / "diagnostics" / "hit_rate.json").write_text(json.dumps(found))
    (folder / "diagnostics" / "hit_rate.png").write_bytes(PNG)
    return folder


class Page(HTMLParser):
    """Text by the id of its section ("" for what stands before), and every attribute that could load something."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.section, self.text, self.sources, self.tags = "", {"": ""}, [], []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href", "data", "srcset")]
        if tag == "section":
            self.section = found["id"] or ""
            self.text[self.section] = ""

    def handle_data(self, data: str) -> None:
        self.text[self.section] += " ".join(data.split()) + " "


def test_the_page_says_first_where_inducekv_falls_short(out):
    content = write_report(out)
    html = (out / "report.html").read_text()
    page = Page(html)
    first = html.partition('<p class="summary')[2].partition("</p>")[0]
    assert first.index("Where InduceKV falls short") < first.index("Who won.")
    assert html.index("<p") == html.index('<p class="summary')
    assert "is not ahead of LoRA + replay (AP 0.0 ± 0.0, no difference beyond the error), behind on digit" in first
    assert content["says"].startswith("Where InduceKV falls short, first. With 32 entries, InduceKV (refined)")
    told = page.text["what-was-run"]
    assert "4 a task, 9 base questions" in told
    assert "by inducekv-serve over HTTP" in told
    assert "torch" in told
    assert "All methods are complete" in told
    assert "“Which guild owns" in page.text["the-tasks"]
    assert "no memory: “no_memory says”" in page.text["the-tasks"]
    assert "335,872" in page.text["what-the-bytes-buy-otherwise"]  # 32 entries of the demo model in float16
    assert "no relevance gate" in page.text["ablations"]
    shown = page.text["diagnostics"]
    assert "Hit rate, InduceKV (refined), 32 entries. It hits <often>. (Source: Retrieval Quality.)" in shown
    assert "python -m benchmarks.continual run --out out" in page.text["commands"]
    assert "base retention" in page.text["terms"]
    for section in ("results", "task-by-task", "learning-and-forgetting", "cost", "settings"):
        assert page.text[section].strip()


def test_the_page_loads_and_runs_nothing_and_names_no_place(out, tmp_path):
    write_report(out)
    html, content = (out / "report.html").read_text(), (out / "report.json").read_text()
    page = Page(html)
    assert page.sources
    assert all(source.startswith("data:image/") for source in page.sources)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    for text in (html, content):
        assert str(tmp_path) not in text
        assert str(CHECKPOINT.parent) not in text


def test_the_json_file_holds_rows_differences_and_runs(out):
    write_report(out)
    content = json.loads((out / "report.json").read_text())
    assert (content["suite"], content["missing"]) == ("demo", [])
    rows = {row["method"]: row for row in content["results"]}
    assert rows["refined"]["metrics"]["AP"] == {"mean": 0.875, "standard_error": 0.0}
    assert rows["lora_replay"]["tasks"]["guild"]["mean"] == 0.75
    differences = {(one["method"], one["against"]): one for one in content["differences"]}
    assert differences["refined", "no_memory"]["AP"]["mean"] == 0.75
    assert differences["refined", "lora_replay"]["tasks"]["digit"]["verdict"] == "less"
    assert differences["refined_no_gate", "refined"]["base_final"]["mean"] == round(-5 / 9, 4)
    (run, *_) = [run for run in content["runs"] if run["method"] == "refined"]
    assert (run["base"], run["anchor_bytes"]) == ([1.0, 1.0], 2048)
    assert run["seconds"][0]["learn"] == 1.2346
    assert "reports" not in run
    assert content["diagnostics"][0]["bins"] == [1, 2]


def test_an_unfinished_folder_is_reported_with_what_is_missing(out, capsys):
    path = out / "lora_replay" / "budget-32" / "seed-1" / "matrix.json"
    matrix = json.loads(path.read_text())
    matrix |= {"complete": False, "accuracy": matrix["accuracy"][:1], "base": matrix["base"][:1]}
    path.write_text(json.dumps(matrix))
    files = ["--html", str(out / "a" / "page.html"), "--json", str(out / "a" / "all.json")]
    assert main(["report", "--out", str(out), *files]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["missing"] == ["lora_replay, budget 32, seed 1: 1 of 2 tasks done; not counted."]
    page = Page((out / "a" / "page.html").read_text())
    assert "seed 1: 1 of 2 tasks done" in page.text["what-was-run"]
    assert "1, without 1" in page.text["results"]
    assert not (out / "report.html").exists()


def test_other_data_are_not_shown_as_the_runs(out, tmp_path):
    load(tmp_path / "other", {**SIZES, "test": 3}, BASE_SIZES)
    write_report(out, data=tmp_path / "other")
    told = Page((out / "report.html").read_text()).text["the-tasks"]
    assert "cannot be shown" in told
    assert "not the data of the run" in told


def test_searched_settings_are_told(out, tmp_path):
    trials = [
        {"settings": {"learning_rates": [rate]}, "AP": ap, "base_final": 0.5, "seconds": 3.0}
        for rate, ap in ((0.001, 0.625), (0.002, 0.5))
    ]
    found = {"search": {"tasks": ["guild"]}, "digest": "d", "methods": {}}
    found["methods"]["lora_replay"] = {"settings": {"learning_rates": [0.001]}, "trials": trials}
    found["methods"]["refined"] = {"settings": {"steps": 9}, "trials": [{**trials[0], "settings": {"steps": 9}}]}
    found["methods"]["ewc"] = {"settings": {}, "trials": []}
    (tmp_path / "tuned.json").write_text(json.dumps(found))
    write_report(out, tuned=tmp_path / "tuned.json")
    told = Page((out / "report.html").read_text()).text["settings"]
    assert "LoRA + replay learning_rates = [0.001] 62.5 50.0 3 used here" in told
    assert "InduceKV (refined) steps = 9 62.5 50.0 3 this run used others" in told
    assert "EWC" not in told


def test_a_folder_of_nothing_is_refused(out, tmp_path, capsys):
    assert main(["report", "--out", str(tmp_path / "nowhere")]) == 2
    assert "not the folder of a run" in capsys.readouterr().err
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "run.json").write_bytes((out / "run.json").read_bytes())
    assert main(["report", "--out", str(tmp_path / "begun")]) == 2
    assert "no task of any stream is done yet" in capsys.readouterr().err
    (out / "diagnostics" / "odd.json").write_text("[]")
    assert main(["report", "--out", str(out)]) == 2
    assert "odd.json: not what a diagnostic writes" in capsys.readouterr().err


def test_another_model_is_refused(out, tmp_path):
    with pytest.raises(ConfigError, match="is of the model 'checkpoint': name its folder with --model"):
        write_report(out, tmp_path)


def test_commands_are_kept_once_and_without_their_places(tmp_path):
    record_command(tmp_path, ["python", "-m", "x", "--out", str(tmp_path / "a b"), "--seed", "0"])
    record_command(tmp_path, ["python", "-m", "x", "--out", str(tmp_path / "a b"), "--seed", "0"])
    record_command(tmp_path, ["python", "-m", "x", "--out", "here/it/is"])
    first, second = read_commands(tmp_path)
    assert first["command"] == "python -m x --out 'a b' --seed 0"
    assert second["command"] == "python -m x --out here/it/is"
    assert first["machine"]["versions"]["torch"]
    (tmp_path / "commands.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="not a list of commands"):
        read_commands(tmp_path)
