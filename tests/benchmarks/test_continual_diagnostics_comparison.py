"""Diagnostics that compare finished runs: over orders, seeds and settings, on runs with given scores."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks.continual.diagnostics import comparison, sweep_runs
from benchmarks.continual.diagnostics.__main__ import main
from benchmarks.continual.diagnostics.comparison import distribution
from benchmarks.continual.diagnostics.statistics import correlation, paired_difference, pareto_front, spread
from benchmarks.continual.methods import METHODS, Artifact
from tests.benchmarks.finished_runs import diagnose, refusal, write_configuration, write_run

# Order: the suite has field before guild (`benchmarks.demo.streams`).
GUILD_FIRST, FIELD_FIRST = ("guild", "field"), ("field", "guild")
SCORES = {FIELD_FIRST: {0: 0.5, 1: 0.7}, GUILD_FIRST: {0: 0.2, 1: 0.2}}


@pytest.fixture
def orders(demo_suite, tmp_path):
    """Folders in the order: guild first, field first."""
    folders, data = [tmp_path / "guild", tmp_path / "field"], demo_suite(2, 1, 1)[0]
    for out, order in zip(folders, (GUILD_FIRST, FIELD_FIRST), strict=True):
        write_configuration(out, data, order=order)
        for seed, score in SCORES[order].items():
            write_run(out, "moved", order, seed=seed, metrics={"AP": score})
            write_run(out, "steady", order, seed=seed, metrics={"AP": 0.6})
    write_run(folders[0], "alone", GUILD_FIRST, metrics={"AP": 1.0})
    return folders


def test_order_gives_mean_and_deviation_of_all_runs_and_stars_the_suites_own(orders):
    found = diagnose("order", orders[0], "--also", orders[1])
    assert found["orders"] == [list(GUILD_FIRST), list(FIELD_FIRST)]
    assert found["orders"][found["default_order"]] == list(FIELD_FIRST)
    moved, steady = found["methods"]
    runs = [(run["order"], run["seed"], run["score"]) for run in moved["runs"]]
    assert runs == [(0, 0, 0.2), (0, 1, 0.2), (1, 0, 0.5), (1, 1, 0.7)]
    assert moved["mean"] == pytest.approx(0.4)
    assert moved["standard_deviation"] == pytest.approx(math.sqrt((0.04 + 0.04 + 0.01 + 0.09) / 3), rel=1e-5)
    assert moved["between_orders"] == pytest.approx(0.4 / math.sqrt(2), rel=1e-5)  # of 0.2 and 0.6
    assert moved["within_orders"] == pytest.approx(math.sqrt((0 + 0.02) / 2), rel=1e-5)
    assert (moved["default"], steady["standard_deviation"]) == (pytest.approx(0.6), 0)
    assert found["left_out"] == ["alone with budget 32: not in every folder"]
    assert "the order matters least to steady" in found["finding"]


def test_without_the_suites_own_order_there_is_no_star():
    measured = distribution([{0: 0.2}, {0: 0.4}], default=None)
    assert (measured["default"], measured["within_orders"]) == (None, None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"order": ["guild", "field"]}, "have the same order, guild, field"),
        ({"order": ["field", "beside"]}, "are not orders of the same tasks: field, beside"),
        ({"test_limit": 7}, "differ in test_limit, not in order alone: 256 and 7"),
        ({"data": "other"}, "differ in data, not in order alone"),
    ],
)
def test_folders_that_differ_otherwise_are_no_orders(orders, changed, message, capsys):
    write_configuration(orders[1], **{"order": FIELD_FIRST, **changed})
    assert message in refusal(capsys, "order", orders[0], "--also", orders[1])


def test_orders_that_cannot_be_compared_are_named(orders, capsys):
    assert "needs at least two orders" in refusal(capsys, "order", orders[0])
    message = refusal(capsys, "order", orders[0], "--also", orders[1], "--score", "BLEU")
    assert "there is no metric 'BLEU', there are: AP" in message
    write_run(orders[1], "moved", FIELD_FIRST, seed=1, metrics={"AP": 0.7}, settings={"steps": 9})
    message = refusal(capsys, "order", orders[0], "--also", orders[1])
    assert "differ in steps, not in order alone: None and 9" in message


def test_the_digest_of_a_suite_does_not_depend_on_the_order(demo_suite):
    suite = demo_suite(2, 1, 1)[1]
    field_first, guild_first = suite.ordered(FIELD_FIRST), suite.ordered(GUILD_FIRST)
    assert field_first.digest() == guild_first.digest()
    assert field_first.digest() != suite.ordered(("guild", "beside")).digest()


# Seeds


def test_spread_of_known_values():
    assert spread([1.0, 2.0, 3.0]) == {"mean": 2.0, "standard_deviation": 1.0, "standard_error": 1 / math.sqrt(3)}
    assert spread([4.0]) == {"mean": 4.0, "standard_deviation": None, "standard_error": None}


def test_differences_are_paired_by_seed():
    """Both spread widely over seeds, and differ by the same every time: unpaired errors would be 0.3 and more."""
    found = paired_difference({0: 0.1, 1: 0.5, 2: 0.9, 7: 5.0}, {2: 0.8, 1: 0.4, 0: 0.0})
    assert found["seeds"] == [0, 1, 2]
    assert found["mean"] == pytest.approx(0.1)
    assert found["standard_error"] == pytest.approx(0, abs=1e-12)
    # The interval is Student's: the table's 97.5% quantile for 2 degrees of freedom, and a deviation of 1.
    found, reach = paired_difference({0: 1.0, 1: 2.0, 2: 3.0}, dict.fromkeys(range(3), 0.0)), 4.302653 / math.sqrt(3)
    assert found["interval"] == pytest.approx([2 - reach, 2 + reach], rel=1e-6)
    # Of one seed there is no interval, and without a common one nothing is claimed.
    found = paired_difference({0: 1.0}, {0: 0.25})
    assert (found["mean"], found["interval"]) == (0.75, None)
    nothing = dict.fromkeys(("mean", "standard_error", "interval"))
    assert paired_difference({0: 1.0}, {1: 1.0}) == {"seeds": [], **nothing}


def test_seeds_tells_methods_apart_only_where_the_interval_allows_it(tmp_path):
    write_configuration(tmp_path)
    scores = {"refined": (0.70, 0.72, 0.74), "weaker": (0.60, 0.62, 0.64), "noisy": (0.40, 0.95, 0.70)}
    scores |= {"stronger": (0.80, 0.82, 0.84), "no_memory": (0.10,)}
    for method, of_seeds in scores.items():
        for seed, score in enumerate(of_seeds):
            metrics = {"AP": score, "AF": 0.1 * seed, "base_final": 0.9}
            write_run(tmp_path, method, ("a", "b"), seed=seed, budget=8, metrics=metrics)
    write_run(tmp_path, "refined", ("a", "b"), budget=16)
    found = diagnose("seeds", tmp_path, "--method", "refined", "--budget", 8)
    rows = {(row["method"], row["budget"]): row for row in found["methods"]}
    assert rows["refined", 8]["scores"]["AP"]["mean"] == pytest.approx(0.72)
    assert rows["refined", 8]["scores"]["AP"]["standard_error"] == pytest.approx(0.02 / math.sqrt(3), rel=1e-5)
    assert rows["refined", 8]["scores"]["AF"]["standard_deviation"] == pytest.approx(0.1)
    assert rows["refined", 16]["scores"]["AP"]["standard_error"] is None
    differences = {row["method"]: row["scores"]["AP"] for row in found["ahead_of"]}
    assert sorted(differences) == ["no_memory", "noisy", "stronger", "weaker"]
    assert differences["weaker"]["mean"] == pytest.approx(0.1)
    assert "ahead of weaker; behind stronger; not told apart from no_memory, noisy" in found["finding"]


# The Pareto front


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([(1, 5), (2, 4), (1.5, 3), (3, 4), (4, 1), (0.5, 5), (4, 0.5)], [0, 3, 4]),  # sorted by the first coordinate
        ([(1, 1), (1, 1), (0, 1)], [0, 1]),  # equal points are both kept
        ([(2, 7)], [0]),
        ([], []),
        ([(1, 1), (1, 2)], [1]),  # equal in one coordinate and worse in the other
        ([(1, 1), (2, 1)], [1]),
    ],
)
def test_the_front_holds_the_points_that_no_other_dominates(points, front):
    assert pareto_front(points) == front


def test_correlations_are_of_the_finite_pairs():
    # Ranks 1 2 3 4 against 1 2 4 3: rho = 1 - 6 * 2 / (4 * 15) = 0.8.
    found = correlation([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 10.0, 3.0, math.nan])
    assert found["pairs"] == 4
    assert found["spearman"] == pytest.approx(0.8)
    # Deviations (-1.5, -0.5, 0.5, 1.5) and (-3, -2, 6, -1): their product's sum is 7, the sums of squares 5 and 50.
    assert found["pearson"] == pytest.approx(7 / math.sqrt(5 * 50))
    assert correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])["pearson"] is None


# Sweeps, of a method that learns as well as its setting says

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

    def learn(self, task, previous, out, context):
        if (self.skill, task.name) == self.killed_at:
            raise KeyboardInterrupt
        self.learned.append((self.skill, task.name))
        (out / "skill").write_text(str(self.skill + context.seed % 2))
        return Artifact("none", None, 0, {})


@dataclass(frozen=True)
class Skilled:
    """Stands for a model; its skill is in the state."""

    skill: int = 0

    def prepare(self, artifact: Artifact, state: Path) -> "Skilled":
        return Skilled(int((state / "skill").read_text()))

    def answers(self, examples: Sequence) -> list[str]:
        return [example.answer if row < self.skill else "?" for row, example in enumerate(examples)]


@pytest.fixture
def sweep(demo_suite, tmp_path, monkeypatch):
    """Runs the command on a run's folder; returns its exit status and the JSON it wrote."""
    data, suite = demo_suite(1, 1, 10, *TASKS)
    write_configuration(tmp_path, data, suite)
    methods = {**METHODS, "learner": Learner()}
    monkeypatch.setattr("benchmarks.continual.methods.METHODS", methods)
    monkeypatch.setattr(comparison, "METHODS", methods)
    monkeypatch.setattr(sweep_runs, "OfflineAnswerer", lambda model: Skilled())
    Learner.learned.clear()

    def run(*arguments: str) -> tuple[int, dict | None]:
        command = ["sweeps", "--out", str(tmp_path), "--method", "learner", "--budget", "8"]
        status, written = main([*command, *arguments]), tmp_path / "diagnostics/sweeps.json"
        return status, json.loads(written.read_bytes()) if written.exists() else None

    return run


def test_a_sweep_gives_mean_and_deviation_by_value_and_runs_nothing_twice(sweep, tmp_path):
    arguments = ("--setting", "skill=5,2", "--tasks", "field", "guild", "--seed", "0", "1")
    status, found = sweep(*arguments)
    assert status == 0
    assert (tmp_path / "diagnostics/sweeps.png").exists()
    assert found["tasks"] == ["field", "guild"]
    low, high = found["settings"]["skill"]
    assert (low["value"], high["value"], found["defaults"]) == (2, 5, {"skill": 5})
    assert low["AP"]["mean"] == pytest.approx(0.25)  # 2 and 3 of ten
    assert high["AP"]["mean"] == pytest.approx(0.55)
    assert high["AP"]["standard_deviation"] == pytest.approx(0.1 / 2**0.5, rel=1e-5)
    assert high["AF"]["mean"] == 0
    assert "0.250 to 0.550 over skill (best at 5)" in found["finding"]
    done = len(Learner.learned)
    assert done == 2 * 2 * 2  # values, seeds, tasks

    assert sweep(*arguments) == (0, found)
    assert len(Learner.learned) == done


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
