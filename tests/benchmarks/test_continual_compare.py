"""Diagnostics that compare finished runs, on scores whose spread, order and front are known."""

import json
import math

import pytest

from benchmarks.continual.diagnostics.__main__ import main
from benchmarks.continual.diagnostics.order import distribution
from benchmarks.continual.diagnostics.pareto_front import pareto_front
from benchmarks.continual.diagnostics.seeds import paired_difference
from benchmarks.continual.diagnostics.spread import spread
from benchmarks.continual.suites.demo import load
from tests.benchmarks.compared_runs import found_by, set_configuration, write_run
from tests.benchmarks.finished_runs import write_configuration

SIZES = {"train": 2, "validation": 1, "test": 1}
BASE_SIZES = {"train": 9, "validation": 9, "test": 9}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    load(folder, SIZES, BASE_SIZES)
    return folder


# Order: the suite has field before guild (`benchmarks.demo.streams`).
GUILD_FIRST, FIELD_FIRST = ("guild", "field"), ("field", "guild")
SCORES = {FIELD_FIRST: {0: 0.5, 1: 0.7}, GUILD_FIRST: {0: 0.2, 1: 0.2}}


@pytest.fixture
def orders(tmp_path):
    """Folders in the order: guild first, field first."""
    folders = []
    for order in (GUILD_FIRST, FIELD_FIRST):
        out = tmp_path / order[0]
        set_configuration(out, order=list(order))
        for seed, score in SCORES[order].items():
            write_run(out, "moved", order, {"AP": score}, seed=seed)
            write_run(out, "steady", order, {"AP": 0.6}, seed=seed)
        folders.append(out)
    write_run(folders[0], "alone", GUILD_FIRST, {"AP": 1.0})
    return folders


def test_order_gives_mean_and_deviation_of_all_runs_and_stars_the_suites_own(orders, data):
    found = found_by("order", orders[0], "--also", orders[1], "--data", data)
    assert found["orders"] == [list(GUILD_FIRST), list(FIELD_FIRST)]
    assert found["orders"][found["default_order"]] == list(FIELD_FIRST)
    moved, steady = found["methods"]
    assert [(run["order"], run["seed"], run["score"]) for run in moved["runs"]] == [
        (0, 0, 0.2),
        (0, 1, 0.2),
        (1, 0, 0.5),
        (1, 1, 0.7),
    ]
    assert moved["mean"] == pytest.approx(0.4)
    assert moved["standard_deviation"] == pytest.approx(math.sqrt((0.04 + 0.04 + 0.01 + 0.09) / 3), rel=1e-5)
    assert moved["between_orders"] == pytest.approx(0.4 / math.sqrt(2), rel=1e-5)  # of 0.2 and 0.6
    assert moved["within_orders"] == pytest.approx(math.sqrt((0 + 0.02) / 2), rel=1e-5)
    assert (moved["default"], steady["standard_deviation"]) == (pytest.approx(0.6), 0)
    assert found["left_out"] == ["alone with budget 32: not in every folder"]
    assert "the order matters least to steady" in found["says"]


def test_without_the_suites_own_order_there_is_no_star():
    found = distribution([{0: 0.2}, {0: 0.4}], default=None)
    assert (found["default"], found["within_orders"]) == (None, None)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"order": ["guild", "field"]}, "have the same order, guild, field"),
        ({"order": ["field", "beside"]}, "are not orders of the same tasks: field, beside"),
        ({"test_limit": 7}, "differ in test_limit, not in order alone: 256 and 7"),
        ({"data": "other"}, "differ in data, not in order alone"),
    ],
)
def test_folders_that_differ_otherwise_are_no_orders(orders, data, changed, message, capsys):
    set_configuration(orders[1], **{"order": list(FIELD_FIRST), **changed})
    assert main(["order", "--out", str(orders[0]), "--also", str(orders[1]), "--data", str(data)]) == 2
    assert message in capsys.readouterr().err


def test_runs_of_other_settings_are_no_orders(orders, data, capsys):
    write_settings = orders[1] / "moved/budget-32/seed-1/matrix.json"
    matrix = json.loads(write_settings.read_bytes())
    write_settings.write_text(json.dumps(matrix | {"settings": {"steps": 9}}))
    assert main(["order", "--out", str(orders[0]), "--also", str(orders[1]), "--data", str(data)]) == 2
    assert "differ in steps, not in order alone: None and 9" in capsys.readouterr().err


def test_one_order_is_not_enough(orders, data, capsys):
    assert main(["order", "--out", str(orders[0]), "--data", str(data)]) == 2
    assert "needs at least two orders" in capsys.readouterr().err


def test_a_score_that_is_not_there_is_named(orders, data, capsys):
    command = ["order", "--out", str(orders[0]), "--also", str(orders[1]), "--data", str(data), "--score", "BLEU"]
    assert main(command) == 2
    assert "there is no metric 'BLEU', there are: AP" in capsys.readouterr().err


def test_the_digest_of_a_suite_does_not_depend_on_the_order(data):
    suite = load(data, SIZES, BASE_SIZES)
    one, other = suite.ordered(FIELD_FIRST), suite.ordered(GUILD_FIRST)
    assert one.digest() == other.digest()
    assert one.digest() != suite.ordered(("guild", "beside")).digest()
    assert one.digest() != one.asked_about("validation").digest()


# Seeds


def test_spread_of_known_values():
    assert spread([1.0, 2.0, 3.0]) == {"mean": 2.0, "standard_deviation": 1.0, "standard_error": 1 / math.sqrt(3)}
    assert spread([4.0]) == {"mean": 4.0, "standard_deviation": None, "standard_error": None}


def test_differences_are_paired_by_seed():
    """Both spread widely over seeds, and differ by the same every time: unpaired errors would be 0.3 and more."""
    one, other = {0: 0.1, 1: 0.5, 2: 0.9, 7: 5.0}, {2: 0.8, 1: 0.4, 0: 0.0}
    found = paired_difference(one, other)
    assert found["seeds"] == [0, 1, 2]
    assert found["mean"] == pytest.approx(0.1)
    assert found["standard_error"] == pytest.approx(0, abs=1e-12)


def test_the_interval_is_students():
    found = paired_difference({0: 1.0, 1: 2.0, 2: 3.0}, {0: 0.0, 1: 0.0, 2: 0.0})
    reach = 4.302653 / math.sqrt(3)  # the table's 97.5% quantile for 2 degrees of freedom, and a deviation of 1
    assert found["interval"] == pytest.approx([2 - reach, 2 + reach], rel=1e-6)


def test_without_a_common_seed_nothing_is_claimed():
    assert paired_difference({0: 1.0}, {1: 1.0}) == {
        "seeds": [],
        "mean": None,
        "standard_error": None,
        "interval": None,
    }
    assert paired_difference({0: 1.0}, {0: 0.25})["mean"] == 0.75
    assert paired_difference({0: 1.0}, {0: 0.25})["interval"] is None


def test_seeds_tells_methods_apart_only_where_the_interval_allows_it(tmp_path):
    write_configuration(tmp_path)
    scores = {
        "refined": (0.70, 0.72, 0.74),
        "weaker": (0.60, 0.62, 0.64),
        "noisy": (0.40, 0.95, 0.70),
        "stronger": (0.80, 0.82, 0.84),
        "no_memory": (0.10,),
    }
    for method, of_seeds in scores.items():
        for seed, score in enumerate(of_seeds):
            metrics = {"AP": score, "AF": 0.1 * seed, "base_final": 0.9}
            write_run(tmp_path, method, ("a", "b"), metrics, seed=seed, budget=8)
    write_run(tmp_path, "refined", ("a", "b"), {"AP": 1.0, "AF": 0.0, "base_final": 1.0}, budget=16)
    found = found_by("seeds", tmp_path, "--method", "refined", "--budget", 8)
    rows = {(row["method"], row["budget"]): row for row in found["methods"]}
    assert rows["refined", 8]["scores"]["AP"]["mean"] == pytest.approx(0.72)
    assert rows["refined", 8]["scores"]["AP"]["standard_error"] == pytest.approx(0.02 / math.sqrt(3), rel=1e-5)
    assert rows["refined", 8]["scores"]["AF"]["standard_deviation"] == pytest.approx(0.1)
    assert rows["refined", 16]["scores"]["AP"]["standard_error"] is None
    differences = {row["method"]: row["scores"]["AP"] for row in found["ahead_of"]}
    assert sorted(differences) == ["no_memory", "noisy", "stronger", "weaker"]
    assert differences["weaker"]["mean"] == pytest.approx(0.1)
    assert "ahead of weaker; behind stronger; not told apart from no_memory, noisy" in found["says"]


# Rounding


def rounded(mass: float, divergence: float, relaxed: float | None, deployed: float | None) -> dict:
    """As `selector.update.inputs` reports it."""
    nll = None
    if relaxed is not None and deployed is not None:
        nll = {"no_memory": 9.0, "relaxed": relaxed, "deployed": deployed, "rounding_gap": deployed - relaxed}
    kept = {"mass_captured": mass, "retrieval_divergence_nats": divergence, "collapsed": False}
    return {"rounding": kept, "validation_nll": nll}


def test_rounding_is_averaged_over_seeds_by_task_and_over_all(tmp_path):
    write_configuration(tmp_path)
    first = [rounded(0.9, 0.01, 1.0, 1.5), rounded(0.5, 0.03, 2.0, 2.0)]
    second = [rounded(0.7, 0.03, 1.0, 1.1), rounded(0.5, 0.05, None, None)]
    for seed, reports in enumerate((first, second)):
        write_run(tmp_path, "paper", ("a", "b"), {}, seed=seed, reports=reports)
    found = found_by("rounding", tmp_path)
    a, b = found["tasks"]
    assert (a["task"], b["task"]) == ("a", "b")
    assert a["mass_captured"]["mean"] == pytest.approx(0.8)
    assert a["nll_gap"]["mean"] == pytest.approx(0.3)
    assert a["deployed_nll"]["mean"] == pytest.approx(1.3)
    assert a["retrieval_divergence_nats"]["standard_deviation"] == pytest.approx(0.02 / math.sqrt(2), rel=1e-5)
    assert b["nll_gap"] == {"mean": 0.0, "standard_deviation": None, "standard_error": None}
    assert found["overall"]["mass_captured"]["mean"] == pytest.approx(0.65)
    assert found["overall"]["nll_gap"]["mean"] == pytest.approx(0.2)
    assert "keep 65.0% of the relaxed weight" in found["says"]
    assert (found["updates"], found["collapsed"]) == (4, 0)


def test_rounding_without_validation_examples_leaves_the_likelihood_out(tmp_path):
    write_configuration(tmp_path)
    write_run(tmp_path, "paper", ("a",), {}, reports=[rounded(0.9, 0.01, None, None)])
    found = found_by("rounding", tmp_path)
    assert found["overall"]["nll_gap"] is None
    assert "NLL" not in found["says"]


def test_a_method_that_does_not_round_is_refused(tmp_path, capsys):
    write_configuration(tmp_path)
    write_run(tmp_path, "refined", ("a",), {})
    assert main(["rounding", "--out", str(tmp_path), "--method", "refined"]) == 2
    assert "the update of a reports no rounding" in capsys.readouterr().err


# The Pareto front


def test_the_front_is_what_no_other_point_beats():
    points = [(1.0, 5.0), (2.0, 4.0), (1.5, 3.0), (3.0, 4.0), (4.0, 1.0), (0.5, 5.0), (4.0, 0.5)]
    assert pareto_front(points) == [0, 3, 4]  # in order of the first number


def test_equal_points_stand_together_and_a_single_one_alone():
    assert pareto_front([(1.0, 1.0), (1.0, 1.0), (0.0, 1.0)]) == [0, 1]
    assert pareto_front([(2.0, 7.0)]) == [0]
    assert pareto_front([]) == []


def test_being_equal_in_one_and_worse_in_the_other_is_beaten():
    assert pareto_front([(1.0, 1.0), (1.0, 2.0)]) == [1]
    assert pareto_front([(1.0, 1.0), (2.0, 1.0)]) == [1]
