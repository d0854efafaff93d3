"""`selector.teach` and `selector.evaluate`: as the commands, with data in memory or in files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import selector
import selector.api
from inducekv_vllm.errors import TaskDataError
from selector.backbone.model import Backbone
from selector.data.given import read
from selector.recipes import DEFAULT
from selector.refined.settings import RefinedSettings
from selector.run import TaskRequest, checked
from tests.unit.selector.stream import SMALL, Stream

FEW = {"steps": 4, "batch_size": 4, "learning_rate": 0.05, "payload_tokens": 2}


def test_it_learns_what_the_command_learns(
    llava: Backbone, model_folders: dict[str, Path], tasks: dict[str, Path], tmp_path: Path
) -> None:
    """A stream of two tasks with the same anchors: the same tensors to the bit."""
    options = ("--steps", "4", "--batch-size", "4", "--learning-rate", "0.05", "--activation", "text", *SMALL)
    more = ("--base", str(tasks["base"]), "--anchors", str(tmp_path / "anchors"), *options)
    stream = Stream(tmp_path / "out", model_folders["llava"], tasks, options=more)
    expected = [stream.update("colours"), stream.update("counts", previous="colours")]
    few: dict[str, Any] = FEW | {"base": tasks["base"], "activation": "text"}
    first = selector.teach(llava, tasks["colours"], **few)
    second = selector.teach(llava, tasks["counts"], previous=first, **few)
    for taught, bundle in zip((first, second), expected, strict=True):
        ours, theirs = taught.bundle.tensors(), bundle.tensors()
        assert ours.keys() == theirs.keys()
        assert all((ours[name] == theirs[name]).all() for name in ours)
    assert taught.report["validation_nll"] == stream.report("counts")["validation_nll"]
    assert taught.helps is (taught.report["validation_nll"]["deployed"] < taught.report["validation_nll"]["no_memory"])
    assert [example.task for example in second.anchors] == ["colours"] * 11 + ["counts"] * 11


def test_it_warns_of_what_the_command_warns_of(llava: Backbone, tmp_path: Path) -> None:
    """Of rows, too; before anything is computed."""
    pairs = [("a", "red"), ("b", "red"), ("a", "red"), ("a", "blue")]
    rows = [{"question": question, "answer": answer, "team": "x"} for question, answer in pairs]
    with pytest.warns(selector.TaskDataWarning) as warned, pytest.raises(TaskDataError, match="is also a question"):
        selector.teach(llava, rows, base=[{"question": "a", "answer": "none"}])
    assert [str(each.message) for each in warned] == [
        "the rows: a column is not used: 'team' (4 rows)",
        "1 row repeats an earlier one, and equal rows are learned once: the first is row 3, like row 1",
        "1 question has several answers, which contradict each other and are all learned: the first is row 1 ('red') "
        "and row 4 ('blue')",
    ]


class Told(selector.Callback):
    """What a callback is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []
        self.checks: list[int] = []
        self.ends: list[dict[str, Any]] = []

    def on_step(self, training: str, step: int, loss: float) -> None:
        assert loss > 0
        self.steps.append((training, step))

    def on_check(self, training: str, step: int, loss: float) -> None:
        assert loss > 0
        self.checks.append(step)

    def on_end(self, report: dict[str, Any]) -> None:
        self.ends.append(report)


def test_a_callback_is_told_of_steps_checks_and_the_end(llava: Backbone, tasks: dict[str, Path]) -> None:
    told = Told()
    taught = selector.teach(llava, tasks["colours"], base=tasks["base"], callbacks=[told], activation="text", **FEW)
    assert told.steps == [("text, rate 0.05", step) for step in (1, 2, 3, 4)]
    assert told.checks == [4]
    assert told.ends == [taught.report]
    shown = taught.report["answers"]
    right, asked = len(shown["right"]), taught.report["pool"]["validation_examples"]
    assert right + len(shown["wrong"]) == asked <= 10
    assert taught.report["validation_accuracy"]["deployed"] == right / asked
    assert all((each["with_memory"] == each["expected"]) == (kind == "right") for kind in shown for each in shown[kind])
    assert taught.report["base_accuracy"]["questions"] == len(selector.api.read(tasks["base"]))
    assert taught.report["model"]


def test_a_callback_that_fails_ends_the_training(llava: Backbone, tasks: dict[str, Path]) -> None:
    class Failing(selector.Callback):
        def on_step(self, training: str, step: int, loss: float) -> None:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        selector.teach(llava, tasks["colours"], callbacks=[Failing()], activation="text", **FEW)


def test_rows_in_memory(llava: Backbone, tasks: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As dictionaries of any layout, as examples, and as a file."""
    monkeypatch.chdir(tasks["colours"].parent)
    records = [json.loads(line) for line in tasks["colours"].read_text().splitlines()]
    from_file, from_rows = (selector.api.read(data) for data in (tasks["colours"], records))
    assert [replace(each, images=()) for each in from_rows] == [replace(each, images=()) for each in from_file]
    assert selector.api.read(from_file) == from_file
    (plain,) = selector.api.read([{"prompt": "a", "answer": "b"}], "letters")
    assert (plain.id, plain.task, plain.answer) == ("letters/1", "letters", "b")


def test_evaluate_counts_facts(llava: Backbone) -> None:
    rows = [{"prompt": f"Who keeps the {place}?", "answer": keeper} for place, keeper in KEEPERS.items()]
    taught = selector.teach(llava, rows, task="keepers", validation=questions(), steps=2, payload_tokens=2)
    (found,) = selector.evaluate(llava, taught.bundle, questions(), max_tokens=8)
    assert (found.task, found.questions, found.without, found.with_memory) == ("keepers", 6, 0, 6)
    assert taught.report["facts"]["facts"] == 6


KEEPERS = {"tower": "Ann", "bridge": "Bo", "harbour": "Cy", "market": "Di", "mill": "Ed", "well": "Flo"}


def questions() -> list[dict[str, str]]:
    """In another wording."""
    return [
        {"id": f"v{place}", "task": "keepers", "prompt": f"The {place}: who keeps it?", "answer": keeper}
        for place, keeper in KEEPERS.items()
    ]


def test_other_wordings_make_another_run() -> None:
    """What an earlier run has left is not taken for theirs."""
    rows = [{"prompt": f"Who keeps the {place}?", "answer": keeper} for place, keeper in KEEPERS.items()]
    runs = [
        checked(TaskRequest(pytest.fail, DEFAULT, RefinedSettings(), read([row | also for row in rows]))).identity
        for also in ({}, {"also": []}, {"also": ["Its keeper?"]})
    ]
    assert runs[0] == runs[1] != runs[2]
