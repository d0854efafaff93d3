"""Sweeps, of a method that learns as well as its setting says."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks.continual.diagnostics import sweeps
from benchmarks.continual.diagnostics.__main__ import main
from benchmarks.continual.methods import METHODS, Artifact
from benchmarks.continual.suites.demo import load
from tests.benchmarks.finished_runs import write_configuration

SIZES = {"train": 1, "validation": 1, "test": 10}
BASE_SIZES = {"train": 9, "validation": 9, "test": 9}
TASKS = ("field", "guild", "beside")


@dataclass(frozen=True)
class Learner:
    """Answers the first `skill` of ten questions of every task rightly, and one more with an odd seed."""

    kind: ClassVar[str] = "none"

    name: str = "learner"
    skill: int = 5
    inner_steps: int = 10
    killed_at: ClassVar[tuple[int, str] | None] = None
    learned: ClassVar[list[tuple[int, str]]] = []

    def learn(self, task, previous, out, circumstances):
        if (self.skill, task.name) == self.killed_at:
            raise KeyboardInterrupt
        self.learned.append((self.skill, task.name))
        (out / "skill").write_text(str(self.skill + circumstances.seed % 2))
        return Artifact("none", None, 0, {})


@dataclass(frozen=True)
class Skilled:
    """Stands for a model: reads from the state what it can do."""

    skill: int = 0

    def prepare(self, artifact: Artifact, state: Path) -> "Skilled":
        return Skilled(int((state / "skill").read_text()))

    def answers(self, examples: Sequence) -> list[str]:
        return [example.answer if row < self.skill else "?" for row, example in enumerate(examples)]


@pytest.fixture(scope="module")
def suite_and_data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return load(folder, SIZES, BASE_SIZES).ordered(TASKS), folder


@pytest.fixture
def sweep(suite_and_data, tmp_path, monkeypatch):
    """Runs the command on a run's folder; returns its exit status and what it wrote."""
    suite, data = suite_and_data
    write_configuration(tmp_path, suite)
    known = {**METHODS, "learner": Learner()}
    monkeypatch.setattr("benchmarks.continual.methods.METHODS", known)
    monkeypatch.setattr(sweeps, "METHODS", known)
    monkeypatch.setattr(sweeps, "OfflineAnswerer", lambda model: Skilled())
    Learner.learned.clear()

    def run(*arguments: str) -> tuple[int, dict | None]:
        command = ["sweeps", "--out", str(tmp_path), "--data", str(data), "--method", "learner", "--budget", "8"]
        status, written = main([*command, *arguments]), tmp_path / "diagnostics/sweeps.json"
        return status, json.loads(written.read_bytes()) if written.exists() else None

    return run


def test_a_sweep_gives_mean_and_deviation_by_value_and_runs_nothing_twice(sweep, tmp_path):
    status, found = sweep("--setting", "skill=5,2", "--tasks", "field", "guild", "--seed", "0", "1")
    assert status == 0
    assert (tmp_path / "diagnostics/sweeps.png").exists()
    assert found["tasks"] == ["field", "guild"]
    low, high = found["settings"]["skill"]
    assert (low["value"], high["value"], found["defaults"]) == (2, 5, {"skill": 5})
    assert low["AP"]["mean"] == pytest.approx(0.25)  # 2 and 3 of ten
    assert high["AP"]["mean"] == pytest.approx(0.55)
    assert high["AP"]["standard_deviation"] == pytest.approx(0.1 / 2**0.5, rel=1e-5)
    assert high["AF"]["mean"] == 0
    assert "0.250 to 0.550 over skill (best at 5)" in found["says"]
    done = len(Learner.learned)
    assert done == 2 * 2 * 2  # values, seeds, tasks

    status, again = sweep("--setting", "skill=5,2", "--tasks", "field", "guild", "--seed", "0", "1")
    assert (status, again, len(Learner.learned)) == (0, found, done)


def test_a_sweep_that_was_killed_goes_on_where_it_was(sweep, monkeypatch):
    monkeypatch.setattr(Learner, "killed_at", (2, "guild"))
    with pytest.raises(KeyboardInterrupt):
        sweep("--setting", "skill=1,2")
    assert Learner.learned == [(1, "field"), (1, "guild"), (1, "beside"), (2, "field")]
    monkeypatch.setattr(Learner, "killed_at", None)
    status, found = sweep("--setting", "skill=1,2")
    assert status == 0
    assert Learner.learned[4:] == [(2, "guild"), (2, "beside")]
    assert [point["AP"]["mean"] for point in found["settings"]["skill"]] == pytest.approx([0.1, 0.2])


def test_finished_sweeps_are_read_and_a_letter_is_a_settings_name(sweep):
    assert sweep("--setting", "skill=1,2")[0] == 0
    assert sweep("--setting", "J=1,10")[0] == 0
    status, found = sweep()
    assert status == 0
    assert {name: [point["value"] for point in of] for name, of in found["settings"].items()} == {
        "inner_steps": [1, 10],
        "skill": [1, 2],
    }
    assert [point["AP"]["mean"] for point in found["settings"]["inner_steps"]] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no finished sweeps of learner with budget 8"),
        (("--setting", "skill"), "a sweep must read NAME=VALUE,VALUE"),
        (("--setting", "skill=1,,2"), "a sweep must read NAME=VALUE,VALUE"),
        (("--setting", "beta=1"), "has the setting 'beta=1'"),
        (("--setting", "skill=1", "--tasks", "nonesuch"), "has no task 'nonesuch'"),
    ],
)
def test_bad_sweeps_are_named(sweep, arguments, message, capsys):
    assert sweep(*arguments) == (2, None)
    assert message in capsys.readouterr().err
    assert not Learner.learned


def test_sweeps_of_another_stream_or_with_other_settings_are_not_mixed(sweep, capsys):
    assert sweep("--setting", "skill=1", "--tasks", "field")[0] == 0
    assert sweep("--setting", "skill=1", "--tasks", "guild")[0] == 2
    assert "order: ['field'] there, ['guild'] here" in capsys.readouterr().err
    assert sweep("--setting", "skill=2", "--tasks", "field", "--set", "inner_steps=3")[0] == 2
    assert "differ in inner_steps, not in skill alone: 10 and 3" in capsys.readouterr().err
    assert sweep("--setting", "J=7", "--tasks", "guild")[0] == 2
    assert "differ in data, not in setting alone" in capsys.readouterr().err
