"""Diagnostics that compare finished runs: over orders and settings, on runs with given scores."""

import math

import pytest

from benchmarks.research.continual.diagnostics.calibration import correlation
from tests.research.finished_runs import diagnose, refusal, write_configuration, write_run

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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"order": ["guild", "field"]}, "each with another order"),
        ({"order": ["field", "beside"]}, "not orders of the same tasks"),
        ({"test_limit": 7}, "differ in test_limit, not in order alone: 256 and 7"),
        ({"data": "other"}, "differ in data, not in order alone"),
    ],
)
def test_folders_that_differ_otherwise_are_no_orders(orders, changed, message, capsys):
    write_configuration(orders[1], **{"order": FIELD_FIRST, **changed})
    assert message in refusal(capsys, "order", orders[0], "--also", orders[1])


# Statistics


def test_correlations_are_of_the_finite_pairs():
    # Ranks 1 2 3 4 against 1 2 4 3: rho = 1 - 6 * 2 / (4 * 15) = 0.8.
    found = correlation([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 10.0, 3.0, math.nan])
    assert found["pairs"] == 4
    assert found["spearman"] == pytest.approx(0.8)
    # Deviations (-1.5, -0.5, 0.5, 1.5) and (-3, -2, 6, -1): their product's sum is 7, the sums of squares 5 and 50.
    assert found["pearson"] == pytest.approx(7 / math.sqrt(5 * 50))
    assert correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])["pearson"] is None


# Sweeps


@pytest.fixture
def swept(tmp_path):
    """Folders of runs with skill = 5, which is the first one's, 2 and 9, and with steps = 7 beside skill = 5."""
    folders = []
    for skill, steps in ((5, 3), (2, 3), (9, 3), (5, 7)):
        out = tmp_path / f"{skill}-{steps}"
        write_configuration(out)
        for seed in (0, 1):
            metrics = {"AP": 0.1 * (skill + seed), "AF": 0.0, "base_final": 1.0}
            settings = {"skill": skill, "steps": steps}
            write_run(out, "learner", GUILD_FIRST, seed=seed, metrics=metrics, settings=settings)
        folders.append(out)
    return folders


def test_a_sweep_gives_mean_and_deviation_by_value(swept):
    first, *others = swept
    found = diagnose("sweeps", first, "--method", "learner", "--also", *others)
    assert {name: [row["value"] for row in curve] for name, curve in found["settings"].items()} == {
        "skill": [2, 5, 9],
        "steps": [3, 7],
    }
    assert (found["defaults"], found["tasks"]) == ({"skill": 5, "steps": 3}, ["guild", "field"])
    low, high = found["settings"]["skill"][:2]
    assert (low["AP"]["mean"], high["AP"]["mean"]) == (pytest.approx(0.25), pytest.approx(0.55))
    assert high["AP"]["standard_deviation"] == pytest.approx(0.1 / 2**0.5, rel=1e-5)
    found = diagnose("sweeps", first, "--method", "learner", "--also", others[0], "--seed", 1)
    assert [row["AP"]["mean"] for row in found["settings"]["skill"]] == pytest.approx([0.3, 0.6])
