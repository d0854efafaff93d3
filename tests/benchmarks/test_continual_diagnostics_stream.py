"""Diagnostics that follow a stream, on matrices, memories, gates and calibrations that are computed by hand."""

import json
import math

import pytest
import torch

from benchmarks.continual.diagnostics.diversity import RANDOM, SELECTED, Chosen, means, summary
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings
from tests.benchmarks.finished_runs import diagnose, refusal, write_configuration, write_finished_run, write_run
from tests.benchmarks.small_streams import ORDER
from tests.inducekv_vllm.bundles import random_bundle

YES, NO = True, False
# a[i, t] of b and c as they are learned after a: base 1, 1/2, 0.
STREAM = [
    {"a": [YES, YES], "base": [YES, YES]},
    {"a": [YES, NO], "b": [YES, YES], "base": [YES, NO]},
    {"a": [NO, NO], "b": [YES, NO], "c": [YES, YES], "base": [NO, NO]},
]
FIXED = [
    {"a": [YES, NO], "base": [YES, YES]},
    {"a": [YES, NO], "b": [YES, YES], "base": [YES, YES]},
    {"a": [YES, NO], "b": [YES, YES], "c": [NO, NO], "base": [YES, YES]},
]


@pytest.fixture
def out(tmp_path):
    """Of a run over data that are not read."""
    write_configuration(tmp_path)
    return tmp_path


@pytest.fixture
def demo(demo_suite, tmp_path):
    """Of a run over two tasks of the demo world, with four training examples each."""
    write_configuration(tmp_path, *demo_suite(4, 1, 1, *ORDER))
    return tmp_path


def test_forgetting_is_the_mean_matrix_and_lines_of_all_methods(out):
    write_finished_run(out, "fixed_calibration", FIXED)
    write_finished_run(out, "refined", STREAM, seed=0)
    write_finished_run(out, "refined", [FIXED[0], FIXED[1], {**STREAM[2], "a": [YES, YES]}], seed=1)
    write_finished_run(out, "no_memory", FIXED, budget=64)
    write_finished_run(out, "elsewhere", FIXED, budget=64)
    found = diagnose("forgetting", out)
    assert found["matrix"] == [[0.75, None, None], [0.5, 1.0, None], [0.5, 0.5, 1.0]]
    assert list(found["methods"]) == ["fixed_calibration", "no_memory", "refined"]  # of this budget, or of none
    mine = found["methods"]["refined"]
    assert mine["base"]["mean"] == [1.0, 0.75, 0.0]
    assert mine["base"]["standard_error"] == [0.0, 0.25, 0.0]
    assert mine["seen"]["mean"] == pytest.approx([0.75, 0.75, 2 / 3], abs=1e-5)
    # Seed 0 forgets all of a and half of b, seed 1 half of b alone.
    assert mine["AF"] == pytest.approx((0.75 + 0.25) / 2)
    assert found["methods"]["no_memory"]["base"]["standard_error"] == [None] * 3
    assert "refined loses 0.500" in found["finding"]


def report(temperature: float, gates: list[float], anchors: float | None) -> dict:
    calibration = {"temperature": temperature, "value_gates": gates, "layer_bias": [0.0, -1.0]}
    return {"calibration": calibration, "history": [{"anchors": 9.0}, {"anchors": anchors}]}


def test_the_calibration_is_traced_with_its_gain_and_what_it_goes_with(out):
    reports = [report(0.07, [0.5, 0.5], None), report(0.2, [0.2, 0.6], 1.0), report(0.1, [0.1, 0.1], 4.0)]
    write_finished_run(out, "fixed_calibration", FIXED)
    write_finished_run(out, "paper", STREAM, reports=reports)
    found = diagnose("calibration", out)
    trace = found["trace"]
    assert trace["temperature"] == [0.07, 0.2, 0.1]
    assert trace["value_gate"] == pytest.approx([0.5, 0.4, 0.1])
    assert trace["layer_bias"] == [-0.5] * 3
    assert trace["anchor_loss"] == [None, 1.0, 4.0]
    assert trace["forgotten"] == [1.0, 0.5, None]
    assert trace["gain"] == [0.5, 0.0, 1.0]
    assert trace["gain_in_the_end"] == [-0.5, -0.5, 1.0]
    assert found["correlations"]["forgotten"] == {"pairs": 2, "pearson": None, "spearman": None}
    assert found["fixed"] == "fixed_calibration"
    assert "gains +0.500 on average when it is learned, most c (+1.000)" in found["finding"]


def test_a_calibration_that_was_not_reported_is_read_from_the_memory(out):
    memories = [random_bundle(seed=seed, temperature=0.1 * (1 + seed)) for seed in range(3)]
    write_finished_run(out, "random", STREAM, bundles=memories)
    found = diagnose("calibration", out, "--method", "random", "--fixed", "nonesuch")
    assert found["trace"]["temperature"] == pytest.approx([0.1, 0.2, 0.3])
    assert found["trace"]["value_gate"] == [0.5] * 3
    assert found["correlations"] is None
    assert "not known, the run has no finished nonesuch" in found["finding"]


def test_orthogonal_keys_are_as_diverse_as_can_be():
    """Of B unit vectors at right angles in d dimensions, C has B eigenvalues 1 / B, and 0 otherwise."""
    orthogonal = Chosen(SELECTED, "a", torch.eye(6)[:3], 10)
    alike = Chosen(SELECTED, "a", torch.eye(6)[[0, 0, 0]], 20)
    found = means([orthogonal])
    assert found["cosine"] == 0.0
    assert found["logdet"] == pytest.approx(3 * math.log(1 / 3 + 1e-3) + 3 * math.log(1e-3))
    assert means([alike])["logdet"] == pytest.approx(math.log(1 + 1e-3) + 5 * math.log(1e-3))
    both = summary([orthogonal, alike])
    assert (both["sets"], both["pairs"], both["pool"], both["cosine"]) == (2, 6, 15.0, 0.5)
    assert (both["cosine_quantiles"][0], both["cosine_quantiles"][-1]) == (0.0, 1.0)
    assert means([Chosen(SELECTED, "a", torch.eye(6)[:1], 1)])["cosine"] is None
    assert means([])["logdet"] is None


@pytest.fixture(scope="module")
def memory(demo_suite, demo_backbone):
    """Memories of any of the four training examples of each task."""
    tasks = demo_suite(4, 1, 1, *ORDER)[1].tasks

    def build(*rows: tuple[int, int]):
        examples = [tasks[task].train[row] for task, row in rows]
        return build_bundle(demo_backbone, examples, BuildSettings(budget=8, payload_tokens=1, weighting="prior"))

    return build


def test_a_memory_is_compared_with_random_ones_of_its_pool(demo, memory):
    memories = [memory((0, 0), (0, 1)), memory((0, 0), (1, 2))]
    write_run(demo, "paper", ORDER, bundles=memories)
    write_run(demo, "paper_no_coverage", ORDER, bundles=[memory((0, 2), (0, 3)), memories[1]])
    found = diagnose("diversity", demo)
    first, second = found["tasks"]
    keys = memories[0].retrieval_keys.float()
    assert first["selected"]["cosine"] == pytest.approx(float(keys[0] @ keys[1]), abs=1e-5)
    assert second["without_coverage"]["logdet"] == second["selected"]["logdet"] != first["without_coverage"]["logdet"]
    # The pool is four examples, then the memory's two entries and four more.
    assert [row[RANDOM]["pool"] for row in found["tasks"]] == [4.0, 6.0]
    assert [row[RANDOM]["sets"] for row in found["tasks"]] == [10, 10]
    assert found["rules"]["selected"]["pairs"] == 2
    assert found["without_coverage"] == "paper_no_coverage"


def test_the_whole_pool_is_the_same_whoever_chose(demo, memory):
    everything = memory(*((0, row) for row in range(4)))
    folder = write_run(demo, "paper", ORDER, bundles=[everything, memory((0, 0), (1, 1))])
    found = diagnose("diversity", demo)
    first = found["tasks"][0]
    assert first["random"]["logdet"] == pytest.approx(first["selected"]["logdet"], rel=1e-4)
    assert first["without_coverage"]["sets"] == 0
    (folder / "00-guild" / "state").rename(folder / "gone")  # as `--keep-states last` leaves it
    found = diagnose("diversity", demo)
    assert [row["task"] for row in found["tasks"]] == ["field"]
    assert found["tasks"][0]["random"]["pool"] == 8.0  # the training examples of both tasks


# Rounding


def rounded(mass: float, divergence: float, relaxed: float | None, deployed: float | None) -> dict:
    """As the selector reports it."""
    nll = None
    if relaxed is not None and deployed is not None:
        nll = {"no_memory": 9.0, "relaxed": relaxed, "deployed": deployed, "rounding_gap": deployed - relaxed}
    kept = {"mass_captured": mass, "retrieval_divergence_nats": divergence, "collapsed": False}
    return {"rounding": kept, "validation_nll": nll}


def test_rounding_is_averaged_over_seeds_by_task_and_over_all(out):
    first = [rounded(0.9, 0.01, 1.0, 1.5), rounded(0.5, 0.03, 2.0, 2.0)]
    second = [rounded(0.7, 0.03, 1.0, 1.1), rounded(0.5, 0.05, None, None)]
    for seed, reports in enumerate((first, second)):
        write_run(out, "paper", ("a", "b"), seed=seed, reports=reports)
    found = diagnose("rounding", out)
    a, b = found["tasks"]
    assert (a["task"], b["task"]) == ("a", "b")
    assert a["mass_captured"]["mean"] == pytest.approx(0.8)
    assert a["nll_gap"]["mean"] == pytest.approx(0.3)
    assert a["deployed_nll"]["mean"] == pytest.approx(1.3)
    assert a["retrieval_divergence_nats"]["standard_deviation"] == pytest.approx(0.02 / math.sqrt(2), rel=1e-5)
    assert b["nll_gap"] == {"mean": 0.0, "standard_deviation": None, "standard_error": None}
    assert found["overall"]["mass_captured"]["mean"] == pytest.approx(0.65)
    assert found["overall"]["nll_gap"]["mean"] == pytest.approx(0.2)
    assert "keep 65.0% of the relaxed weight" in found["finding"]
    assert (found["updates"], found["collapsed"]) == (4, 0)


def test_rounding_without_validation_examples_leaves_the_likelihood_out(out):
    write_run(out, "paper", ("a",), reports=[rounded(0.9, 0.01, None, None)])
    found = diagnose("rounding", out)
    assert found["overall"]["nll_gap"] is None
    assert "NLL" not in found["finding"]


def test_a_method_without_rounding_is_refused(out, capsys):
    write_run(out, "paper", ("a",), bundles=[random_bundle()])
    assert "the update of a reports no rounding" in refusal(capsys, "rounding", out, "--method", "paper")


def test_what_is_mentioned_is_told_from_what_is_the_whole_answer(out):
    folder = write_finished_run(out, "no_memory", [{"a": [YES, NO, NO, NO], "base": [YES]}])
    path = folder / "00-a" / "predictions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line, answer in zip(lines[1:4], ("I say Yes, it is.", "Yesterday.", "no"), strict=True):
        line["answer"] = answer
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert diagnose("mentions", out)["tasks"] == {
        "a": {"exact": 0.25, "mentioned": 0.5},
        "base": {"exact": 1.0, "mentioned": 1.0},
    }
