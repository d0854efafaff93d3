"""Diagnostics that follow a stream, on matrices, memories and calibrations that are computed by hand."""

import json
import math

import numpy as np
import pytest
import torch

from benchmarks.continual.diagnostics.__main__ import main
from benchmarks.continual.diagnostics.correlation import correlation
from benchmarks.continual.diagnostics.diversity import RANDOM, SELECTED, Chosen, brief, summary
from benchmarks.continual.suites.demo import load
from benchmarks.demo.model import CHECKPOINT
from selector.backbone.model import Backbone
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings
from tests.benchmarks.finished_runs import write_configuration, write_finished_run
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


def found_by(name: str, out, *more: str) -> dict:
    assert main([name, "--out", str(out), *more]) == 0
    assert (out / "diagnostics" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((out / "diagnostics" / f"{name}.json").read_bytes())


@pytest.fixture
def out(tmp_path):
    write_configuration(tmp_path)
    write_finished_run(tmp_path, "fixed_calibration", FIXED)
    return tmp_path


def test_forgetting_is_the_mean_matrix_and_lines_of_all_methods(out):
    write_finished_run(out, "refined", STREAM, seed=0)
    write_finished_run(out, "refined", [FIXED[0], FIXED[1], {**STREAM[2], "a": [YES, YES]}], seed=1)
    write_finished_run(out, "no_memory", FIXED, budget=64)
    write_finished_run(out, "elsewhere", FIXED, budget=64)
    found = found_by("forgetting", out)
    assert found["matrix"] == [[0.75, None, None], [0.5, 1.0, None], [0.5, 0.5, 1.0]]
    assert list(found["methods"]) == ["fixed_calibration", "no_memory", "refined"]  # of this budget, or of none
    mine = found["methods"]["refined"]
    assert mine["base"]["mean"] == [1.0, 0.75, 0.0]
    assert mine["base"]["standard_error"] == [0.0, 0.25, 0.0]
    assert mine["seen"]["mean"] == pytest.approx([0.75, 0.75, 2 / 3], abs=1e-5)
    # Seed 0 forgets all of a and half of b, seed 1 half of b alone.
    assert mine["AF"] == pytest.approx((0.75 + 0.25) / 2)
    assert found["methods"]["no_memory"]["base"]["standard_error"] == [None] * 3
    assert "refined loses 0.500" in found["says"]


def report(temperature: float, gates: list[float], anchors: float | None) -> dict:
    calibration = {"temperature": temperature, "value_gates": gates, "layer_bias": [0.0, -1.0]}
    return {"calibration": calibration, "history": [{"anchors": 9.0}, {"anchors": anchors}]}


def test_the_calibration_is_traced_with_its_gain_and_what_it_goes_with(out):
    reports = [report(0.07, [0.5, 0.5], None), report(0.2, [0.2, 0.6], 1.0), report(0.1, [0.1, 0.1], 4.0)]
    write_finished_run(out, "paper", STREAM, reports=reports)
    found = found_by("calibration", out)
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
    assert "gains +0.500 on average when it is learned, most c (+1.000)" in found["says"]


def test_a_calibration_that_was_not_reported_is_read_from_the_memory(out):
    memories = [random_bundle(seed=seed, temperature=0.1 * (1 + seed)) for seed in range(3)]
    write_finished_run(out, "random", STREAM, bundles=memories)
    found = found_by("calibration", out, "--method", "random", "--fixed", "nonesuch")
    assert found["trace"]["temperature"] == pytest.approx([0.1, 0.2, 0.3])
    assert found["trace"]["value_gate"] == [0.5] * 3
    assert found["correlations"] is None
    assert "not known, the run has no finished nonesuch" in found["says"]


def test_correlations_are_of_the_pairs_that_are_known():
    # Ranks 1 2 3 4 against 1 2 4 3: rho = 1 - 6 * 2 / (4 * 15) = 0.8.
    found = correlation([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 10.0, 3.0, math.nan])
    assert found["pairs"] == 4
    assert found["spearman"] == pytest.approx(0.8)
    x, y = np.array([-1.5, -0.5, 0.5, 1.5]), np.array([-3.0, -2.0, 6.0, -1.0])
    assert found["pearson"] == pytest.approx(x @ y / math.sqrt((x @ x) * (y @ y)))
    assert correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])["pearson"] is None


def test_orthogonal_keys_are_as_diverse_as_can_be():
    """Of B unit vectors at right angles in d dimensions, C has B eigenvalues 1 / B, and 0 otherwise."""
    orthogonal = Chosen(SELECTED, "a", torch.eye(6)[:3], 10)
    alike = Chosen(SELECTED, "a", torch.eye(6)[[0, 0, 0]], 20)
    found = brief([orthogonal])
    assert found["cosine"] == 0.0
    assert found["logdet"] == pytest.approx(3 * math.log(1 / 3 + 1e-3) + 3 * math.log(1e-3))
    assert brief([alike])["logdet"] == pytest.approx(math.log(1 + 1e-3) + 5 * math.log(1e-3))
    both = summary([orthogonal, alike])
    assert (both["sets"], both["pairs"], both["pool"], both["cosine"]) == (2, 6, 15.0, 0.5)
    assert (both["cosine_quantiles"][0], both["cosine_quantiles"][-1]) == (0.0, 1.0)
    assert brief([Chosen(SELECTED, "a", torch.eye(6)[:1], 1)])["cosine"] is None
    assert brief([])["logdet"] is None


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Two tasks of four training examples, and memories of two entries: the two most alike, or the least."""
    data = tmp_path_factory.mktemp("data")
    sizes = {"train": 4, "validation": 1, "test": 1}
    suite = load(data, sizes, dict.fromkeys(sizes, 9)).ordered(["guild", "field"])
    backbone = Backbone.load(CHECKPOINT)

    def memory(*rows: tuple[int, int]):
        examples = [suite.tasks[task].train[row] for task, row in rows]
        return build_bundle(backbone, examples, BuildSettings(budget=8, payload_tokens=1))

    return data, suite, memory


def rights(suite) -> list[dict]:
    base = {"base": [YES] * 9}
    return [{"guild": [YES], **base}, {"guild": [YES], "field": [YES], **base}]


def test_a_memory_is_compared_with_random_ones_of_its_pool(demo, tmp_path):
    data, suite, memory = demo
    memories = [memory((0, 0), (0, 1)), memory((0, 0), (1, 2))]
    write_configuration(tmp_path, suite)
    write_finished_run(tmp_path, "paper", rights(suite), bundles=memories)
    write_finished_run(tmp_path, "paper_no_coverage", rights(suite), bundles=[memory((0, 2), (0, 3)), memories[1]])
    found = found_by("diversity", tmp_path, "--data", str(data))
    first, second = found["tasks"]
    keys = memories[0].retrieval_keys.float()
    assert first["selected"]["cosine"] == pytest.approx(float(keys[0] @ keys[1]), abs=1e-5)
    assert second["without_coverage"]["logdet"] == second["selected"]["logdet"] != first["without_coverage"]["logdet"]
    # The pool is four examples, then the memory's two entries and four more.
    assert [row[RANDOM]["pool"] for row in found["tasks"]] == [4.0, 6.0]
    assert [row[RANDOM]["sets"] for row in found["tasks"]] == [10, 10]
    assert found["rules"]["selected"]["pairs"] == 2
    assert found["without_coverage"] == "paper_no_coverage"


def test_the_whole_pool_is_the_same_whoever_chose(demo, tmp_path):
    data, suite, memory = demo
    everything = memory(*((0, row) for row in range(4)))
    write_configuration(tmp_path, suite)
    folder = write_finished_run(tmp_path, "paper", rights(suite), bundles=[everything, memory((0, 0), (1, 1))])
    found = found_by("diversity", tmp_path, "--data", str(data))
    first = found["tasks"][0]
    assert first["random"]["logdet"] == pytest.approx(first["selected"]["logdet"], rel=1e-4)
    assert first["without_coverage"]["sets"] == 0
    (folder / "00-guild" / "state").rename(folder / "gone")  # as `--keep-states last` leaves it
    found = found_by("diversity", tmp_path, "--data", str(data))
    assert [row["task"] for row in found["tasks"]] == ["field"]
    assert found["tasks"][0]["random"]["pool"] == 8.0  # the training examples of both tasks
