"""Diagnostics that follow a stream, on matrices, memories, gates and calibrations that are computed by hand."""

import math

import pytest
import torch

from benchmarks.research.continual.diagnostics.diversity import RANDOM, SELECTED, Chosen, means
from tests.research.extracted import extracted_bundle
from tests.research.finished_runs import diagnose, write_configuration, write_finished_run, write_run
from tests.research.small_streams import ORDER

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
    assert "mean gain over fixed_calibration when a task is learned: +0.500" in found["finding"]


def test_orthogonal_keys_are_as_diverse_as_can_be():
    """Of B unit vectors at right angles in d dimensions, C has B eigenvalues 1 / B, and 0 otherwise."""
    orthogonal = Chosen(SELECTED, "a", torch.eye(6)[:3], 10)
    alike = Chosen(SELECTED, "a", torch.eye(6)[[0, 0, 0]], 20)
    found = means([orthogonal])
    assert found["cosine"] == 0.0
    assert found["logdet"] == pytest.approx(3 * math.log(1 / 3 + 1e-3) + 3 * math.log(1e-3))
    assert means([alike])["logdet"] == pytest.approx(math.log(1 + 1e-3) + 5 * math.log(1e-3))
    both = means([orthogonal, alike])
    assert (both["sets"], both["pool"], both["cosine"]) == (2, 15.0, 0.5)
    assert means([Chosen(SELECTED, "a", torch.eye(6)[:1], 1)])["cosine"] is None
    assert means([])["logdet"] is None


@pytest.fixture(scope="module")
def memory(demo_suite, demo_backbone):
    """Memories of any of the four training examples of each task."""
    tasks = demo_suite(4, 1, 1, *ORDER)[1].tasks

    def build(*rows: tuple[int, int]):
        examples = [tasks[task].train[row] for task, row in rows]
        return extracted_bundle(demo_backbone, examples, payload_tokens=1, weighting="prior")

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
    assert found["rules"]["selected"]["sets"] == 2
    assert found["without_coverage"] == "paper_no_coverage"
