"""Suites: in what order and how much of them, and from files, where every mistake is named."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.research.continual.__main__ import main
from benchmarks.research.continual.suites import load_suite
from inducekv_vllm.errors import ConfigError, TaskDataError
from tests.research.small_streams import ORDER, command

pytestmark = pytest.mark.usefixtures("without_report")

SPLITS = ("train", "validation", "test")


def test_settings_can_be_chosen_without_a_look_at_the_test_questions(suite):
    asked = suite.asked_about("validation")
    for task, original in zip((*asked.tasks, asked.base), (*suite.tasks, suite.base), strict=True):
        assert task.test == task.validation == original.validation
    assert asked.digest() != suite.digest()
    assert suite.asked_about("test") == suite


def description(folder: str = "data") -> dict[str, Any]:
    def splits(name: str) -> dict[str, str]:
        return {split: f"{folder}/{name}/{split}.jsonl" for split in SPLITS}

    return {"name": "mine", "tasks": [{"name": name, **splits(name)} for name in ORDER], "base": splits("base")}


def as_toml(described: dict[str, Any]) -> str:
    def table(head: str, values: dict[str, str]) -> str:
        return "\n".join([head, *(f"{key} = {json.dumps(value)}" for key, value in values.items())])

    tasks = [table("[[tasks]]", task) for task in described["tasks"]]
    base = [table("[base]", described["base"])] if "base" in described else []
    return "\n".join([f'name = "{described["name"]}"', *tasks, *base])


@pytest.fixture
def folder(data, tmp_path) -> Path:
    """A folder with suite.toml, and the data of its two tasks and of its base."""
    for name in (*ORDER, "base"):
        shutil.copytree(data / name, tmp_path / "data" / name)
    (tmp_path / "suite.toml").write_text(as_toml(description()))
    return tmp_path


def test_a_suite_file_gives_the_tasks_it_names_in_their_order(folder, suite):
    found = load_suite(str(folder / "suite.toml"), folder)
    assert (found.name, [task.name for task in found.tasks]) == ("mine", list(ORDER))
    assert found.digest() == suite.digest()


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    described = description()
    change(described)
    return as_toml(described)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("bad.toml", 'name = "mine"\n\ntasks = oops', "bad.toml: malformed TOML: Invalid value (at line 3"),
        ("bad.toml", changed(lambda d: d["base"].pop("test")), "describes no suite: base.test: Field required"),
        ("bad.toml", changed(lambda d: d["tasks"][1].update(tset="x")), "tasks.1.tset: Extra inputs"),
        ("bad.toml", changed(lambda d: d["tasks"][1].update(name="../up")), "tasks.1.name: "),
        ("bad.toml", changed(lambda d: d["tasks"][1].update(name=ORDER[0])), f"name of its own, not {ORDER[0]!r}"),
        ("bad.toml", changed(lambda d: d["base"].update(test="none.jsonl")), "none.jsonl: cannot read the task data"),
    ],
)
def test_a_file_that_describes_no_suite_is_refused(name, text, message, folder, capsys):
    (folder / name).write_text(text)
    assert main(command(folder, folder / "out", "--suite", str(folder / name), "--order", "default")) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_base_and_validation_may_be_absent(tmp_path):
    folder = tmp_path / "s"
    folder.mkdir()
    lines = [
        {"id": f"q{n}", "task": "t", "messages": [{"role": "user", "content": f"What is {n}?"}], "answer": str(n)}
        for n in range(30)
    ]
    for name, part in (("train", lines[:25]), ("test", lines[25:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in part))
    (folder / "s.toml").write_text('name = "s"\n[[tasks]]\nname = "t"\ntrain = "train.jsonl"\ntest = "test.jsonl"\n')
    found = load_suite(str(folder / "s.toml"), folder)
    assert (found.base.test, found.tasks[0].validation) == ((), ())
    held = found.with_validation().tasks[0]
    assert (len(held.train), len(held.validation), len(held.test)) == (23, 2, 5)
    assert held.with_validation() == held
    assert {e.id for e in (*held.train, *held.validation)} == {e.id for e in found.tasks[0].train}
    untested = replace(found, tasks=(replace(held, test=()),))
    with pytest.raises(ConfigError, match="task 't' of suite 's' needs training examples and test questions"):
        untested.limited(10, 10, 10)
    with pytest.raises(TaskDataError, match="expected two training examples or more, found 1"):
        replace(found.tasks[0], train=found.tasks[0].train[:1]).with_validation()


def refusal(folder: Path) -> str:
    with pytest.raises(TaskDataError) as refused:
        load_suite(str(folder / "suite.toml"), folder)
    return str(refused.value)


def test_a_question_of_two_splits_is_refused(folder):
    data = folder / "data"
    (first, *_) = (data / "guild" / "train.jsonl").read_text().splitlines()
    test = data / "guild" / "test.jsonl"
    before = test.read_text()
    test.write_text(json.dumps(json.loads(first) | {"id": "again"}) + "\n" + before)
    found = f"{test}: the question 'again' is in {data}/guild/train.jsonl too, as 'guild/train_00000'"
    assert refusal(folder) == found
    test.write_text(before)
    shutil.copytree(data / "guild" / "images", data / "base" / "images", dirs_exist_ok=True)
    base = data / "base" / "test.jsonl"
    base.write_text(json.dumps(json.loads(first) | {"id": "again"}) + "\n" + base.read_text())
    assert "the question 'guild/train_00000' of guild is also a base question" in refusal(folder)
