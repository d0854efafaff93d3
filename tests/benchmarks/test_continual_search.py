"""The search with methods that only write their setting down, on questions whose splits can be told apart."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks.continual import search as searching
from benchmarks.continual.__main__ import main
from benchmarks.continual.methods import Artifact, RunContext, choose_methods
from benchmarks.continual.search import (
    Search,
    grid_trials,
    require_equal_trials,
    run_trials,
    score_method,
    searched_suite,
)
from benchmarks.continual.suites import Suite, TaskData
from benchmarks.continual.tuned import (
    apply_settings,
    read_tuned,
    tuned_methods,
    tuned_settings,
    unsearched_digest,
    write_tuned,
)
from benchmarks.machine import describe_machine
from inducekv_vllm.errors import ConfigError
from selector.data.examples import Example
from server.demo import CHECKPOINT


def task_data(task: str) -> TaskData:
    """Question k of each split has the answer "k"."""
    splits = (
        tuple(Example(f"{task}/{split}_{k}", task, (), (), str(k), f"{task}{split}{k}") for k in range(10))
        for split in ("train", "validation", "test")
    )
    return TaskData(task, *splits)


@pytest.fixture
def suite() -> Suite:
    return Suite("tiny", tuple(task_data(name) for name in ("one", "two", "three")), task_data("base"))


@dataclass(frozen=True)
class Fake:
    """Answers the first `right` questions of every task right, of the task `bad_at` none."""

    kind: ClassVar[str] = "none"
    trials: ClassVar[tuple[Mapping[str, Any], ...]] = ({"right": 4}, {"right": 7}, {"right": 7, "bad_at": "base"})

    name: str = "fake"
    right: int = 0
    steps: int = 5
    bad_at: str = ""

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        seen = [e.id for part in (task.train, task.validation, task.test, context.base) for e in part]
        assert not [identity for identity in seen if "/test" in identity]
        number = 10 * context.seed + context.number  # no two states are the same
        (out / "state").write_text(f"{self.right} {self.bad_at} {number}")
        return Artifact("none", None, 0, {})


@dataclass(frozen=True)
class Fixed:
    """Has nothing to search."""

    name: str = "fixed"


@dataclass
class FakeAnswerer:
    """Knows from the state how many to answer right; keeps what it was asked."""

    asked: list[str]
    right: int = 0
    bad_at: str = ""

    def prepare(self, artifact: Artifact, state: Path) -> FakeAnswerer:
        right, bad_at, _ = (state / "state").read_text().split(" ")
        return FakeAnswerer(self.asked, int(right), bad_at)

    def answers(self, examples: Sequence[Example]) -> list[str]:
        self.asked += [example.id for example in examples]
        return [example.answer if self._knows(example) else "?" for example in examples]

    def _knows(self, example: Example) -> bool:
        return int(example.answer) < (0 if example.task == self.bad_at else self.right)


@pytest.fixture
def shared(suite: Suite, tmp_path: Path) -> Search:
    trials = {"fake": Fake.trials, "fixed": (), "refusing": Fake.trials}
    return Search(trials, searched_suite(suite, 2, 10, 10, 10), CHECKPOINT, 8, (0, 1), tmp_path / "trials")


def search(shared: Search, method: Any, asked: list[str]) -> dict[str, Any]:
    assert run_trials([method], shared, FakeAnswerer(asked)) == {}
    return score_method(method, shared)


def test_the_best_trial_wins_and_no_test_question_is_ever_read(shared):
    asked: list[str] = []
    found = search(shared, Fake(), asked)
    assert [trial["AP"] for trial in found["trials"]] == pytest.approx([0.4, 0.7, 0.7])
    assert found["settings"] == {"right": 7}  # the first of equal ones
    # Base accuracy stands beside the criterion and does not count.
    assert [trial["base_final"] for trial in found["trials"]] == pytest.approx([0.4, 0.7, 0.0])
    assert {name.split("_")[0] for name in asked} == {"one/validation", "two/validation", "base/validation"}
    # 3 trials, 2 seeds: after the first task 10 + 10 questions, after the second 20 + 10.
    assert len(asked) == 3 * 2 * 50
    assert (shared.folder / "trial-1" / "fake" / "budget-8" / "seed-1" / "matrix.json").exists()


def test_a_search_goes_on_where_it_was_killed(shared):
    first = search(shared, Fake(), [])
    asked: list[str] = []
    assert search(shared, Fake(), asked) == first
    assert asked == []
    shutil.rmtree(shared.folder / "trial-2" / "fake" / "budget-8" / "seed-0")
    shutil.rmtree(shared.folder / "trial-2" / "answers")
    again = search(shared, Fake(), asked)
    assert again["settings"] == first["settings"]
    assert [trial["AP"] for trial in again["trials"]] == [trial["AP"] for trial in first["trials"]]
    assert len(asked) == 50


@dataclass(frozen=True)
class Refusing(Fake):
    name: str = "refusing"

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        raise ConfigError("not with this budget")


def test_a_method_that_cannot_be_run_does_not_stop_the_others(shared):
    assert run_trials([Refusing(), Fake()], shared, FakeAnswerer([])) == {"refusing": "not with this budget"}
    assert score_method(Fake(), shared)["settings"] == {"right": 7}


def test_the_searched_suite_holds_no_test_question(suite):
    searched = searched_suite(suite, 2, 5, 4, 3)
    parts = [part for task in (*searched.tasks, searched.base) for part in (task.train, task.validation, task.test)]
    assert not [example.id for part in parts for example in part if "/test" in example.id]
    assert [task.name for task in searched.tasks] == ["one", "two"]
    assert [len(task.test) for task in (*searched.tasks, searched.base)] == [4, 4, 3]
    for tasks in (0, 4):
        with pytest.raises(ConfigError, match=f"has 3 tasks, a search over {tasks}"):
            searched_suite(suite, tasks, 5, 4, 3)


def test_all_methods_have_equally_many_different_trials():
    assert require_equal_trials({"fake": Fake.trials, "fixed": (), "other": Fake.trials}) == 3
    assert require_equal_trials({"fixed": ()}) == 0
    with pytest.raises(ConfigError, match="same number of trials, found fake: 3, fewer: 2"):
        require_equal_trials({"fake": Fake.trials, "fewer": Fake.trials[:2]})
    with pytest.raises(ConfigError, match=r"repeated: the trial \{'right': 4\} occurs more than once"):
        require_equal_trials({"repeated": (*Fake.trials[:2], Fake.trials[0])})


def test_a_grid_is_every_combination_of_its_values():
    assert grid_trials(["modules=all,o_proj", "learning_rate=0.1,2e-3"]) == (
        {"modules": "all", "learning_rate": 0.1},
        {"modules": "all", "learning_rate": 0.002},
        {"modules": "o_proj", "learning_rate": 0.1},
        {"modules": "o_proj", "learning_rate": 0.002},
    )
    for wrong in (["right"], ["=1"], ["right=1,"], ["right=1", "right=2"]):
        with pytest.raises(ConfigError, match=r"needs KEY=V1,V2 with each KEY once, found '"):
            grid_trials(wrong)


def test_winners_are_read_back_and_applied(shared, tmp_path):
    path = tmp_path / "tuned.json"
    found = search(shared, Fake(), [])
    write_tuned(path, {"budget": 8}, {"fake": found})
    write_tuned(path, {"budget": 8}, {"fixed": search(shared, Fixed(), [])})
    assert tuned_settings(path, Fake()) == Fake(right=7)
    assert tuned_settings(path, Fixed()) == Fixed()
    assert tuned_settings(path, Fake(right=1)) == Fake(right=7)  # the default of a searched setting may change
    assert read_tuned(path)["methods"]["fake"]["trials"] == found["trials"]
    assert read_tuned(path)["machine"] == describe_machine()
    with pytest.raises(ConfigError, match="no searched settings of other, only of: fake, fixed"):
        tuned_settings(path, Fake("other"))
    with pytest.raises(ConfigError, match="fake was searched with other settings than it has now"):
        tuned_settings(path, Fake(steps=6))
    with pytest.raises(ConfigError, match="of a search of another configuration"):
        write_tuned(path, {"budget": 16}, {"fake": found})


def test_a_run_with_the_settings_of_the_search_takes_its_winners(tmp_path):
    path, given = tmp_path / "tuned.json", ["steps=7"]
    (searched,) = choose_methods(["lora"], given)
    record = {"settings": {"learning_rate": 0.25}, "searched": ["learning_rate"]}
    record["unsearched"] = unsearched_digest(searched, ["learning_rate"])
    write_tuned(path, {}, {"lora": record})
    (lora,) = tuned_methods(path, ["lora"], given)
    assert (lora.steps, lora.learning_rate) == (7, 0.25)
    (lora,) = tuned_methods(path, ["lora"], [*given, "learning_rate=0.5"])  # what is given wins
    assert (lora.steps, lora.learning_rate) == (7, 0.5)
    for other in ([], ["steps=8"]):
        with pytest.raises(ConfigError, match="lora was searched with other settings than it has now"):
            tuned_methods(path, ["lora"], other)


def test_settings_that_a_method_lacks_are_refused():
    with pytest.raises(ConfigError, match="fake has no setting 'rigth', it has: right, steps, bad_at"):
        apply_settings(Fake(), {"rigth": 1})
    with pytest.raises(ConfigError, match="right must be like 0, found 'many'"):
        apply_settings(Fake(), {"right": "many"})


@pytest.mark.parametrize("content", [None, "{", "[]", '{"digest": "", "methods": {"fake": {}}}'])
def test_a_file_of_something_else_is_refused(content, tmp_path):
    path = tmp_path / "tuned.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"tuned\.json: not a file of searched settings"):
        tuned_settings(path, Fake())


def test_the_command_searches_methods_without_settings_too(tmp_path, capsys, suite, monkeypatch):
    monkeypatch.setattr(searching, "load_suite", lambda name, data: suite)
    monkeypatch.setattr(searching, "METHODS", {"fake": Fake(), "fixed": Fixed()})
    monkeypatch.setattr(searching, "choose_methods", lambda names, settings: [Fake(), Fixed()])
    monkeypatch.setattr(searching, "OfflineAnswerer", lambda model: FakeAnswerer([]))
    arguments = ["search", "--out", str(tmp_path / "out"), "--method", "all", "--jobs", "1"]
    assert main([*arguments, "--tasks", "2"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["machine"] == describe_machine()
    assert (printed["split"], printed["trials"]) == ("validation", 3)
    assert {name: one["settings"] for name, one in printed["methods"].items()} == {"fake": {"right": 7}, "fixed": {}}
    assert read_tuned(tmp_path / "out" / "tuned.json")["methods"] == printed["methods"]
    assert main([*arguments, "--tasks", "3"]) == 2  # the folder is of another configuration
    assert "tasks: ['one', 'two'] there" in capsys.readouterr().err
    assert main([*arguments, "--tasks", "4"]) == 2
    assert "has 3 tasks" in capsys.readouterr().err
