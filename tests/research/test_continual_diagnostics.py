"""The diagnostics of finished runs: each reads what it says, and measures what is computed by hand."""

import math

import numpy as np
import pytest
import torch

from benchmarks.research.continual.diagnostics.calibration import correlation
from benchmarks.research.continual.diagnostics.diversity import SELECTED, Chosen, means
from benchmarks.research.continual.diagnostics.memory_attention import memory_masses
from benchmarks.research.continual.diagnostics.retrieval import Answered, Retrieval, hit_rate_bins, retrievals
from benchmarks.research.continual.results import Finished
from inducekv_vllm.bundle import EntryRecord, Gate
from inducekv_vllm.errors import ConfigError, TaskDataError
from selector.backbone.model import Backbone
from tests.bundles import d, random_bundle, random_gate
from tests.research.extracted import extracted_bundle
from tests.research.finished_runs import diagnose, write_configuration, write_finished_run, write_run

MEMORY = [{"a": [True, True], "base": [True]}, {"a": [True, False], "b": [True, True], "base": [False]}]
PLAIN = [{"a": [False, False], "base": [True]}, {"a": [False, True], "b": [False, False], "base": [True]}]


@pytest.fixture
def run(tmp_path):
    write_configuration(tmp_path)
    bundles = [random_bundle(seed=seed) for seed in (0, 1)]
    write_finished_run(tmp_path, "refined", MEMORY, seed=0, bundles=bundles)
    write_finished_run(tmp_path, "refined", MEMORY, seed=1)
    write_finished_run(tmp_path, "no_memory", PLAIN, seed=5)
    return tmp_path


def test_a_run_is_read_with_its_matrix_predictions_and_memory(run):
    first, second = Finished.read(run).runs("refined", 32)
    assert (first.seed, second.seed, first.order) == (0, 1, ["a", "b"])
    np.testing.assert_array_equal(first.accuracy, [[1.0, np.nan], [0.5, 1.0]])
    assert first.base == [1.0, 0.0]
    assert list(first.predictions(0)) == [("a", "0"), ("a", "1"), ("base", "0")]
    assert not first.predictions()["a", "1"].right
    assert first.bundle(0).digest == random_bundle(seed=0).digest
    assert first.bundle().digest == random_bundle(seed=1).digest
    with pytest.raises(ConfigError, match="refined has no memory bundle to look at: what it makes is 'none'"):
        second.bundle()
    first.state(0).rename(first.state(0).with_name("gone"))
    with pytest.raises(ConfigError, match=r"00-a/state: the state after this task was not kept; `--keep-states all`"):
        first.bundle(0)


def test_predictions_are_paired_with_the_untouched_model_whatever_its_seed(run):
    finished = Finished.read(run)
    pairs = finished.paired(finished.runs("refined")[0])
    assert [mine.task for mine, _ in pairs] == ["a", "a", "b", "b", "base"]
    assert [mine.right for mine, _ in pairs] == [True, False, True, True, False]
    assert [theirs.right for _, theirs in pairs] == [False, True, False, False, True]
    # Predictions of other questions are not paired.
    path = run / "no_memory/budget-32/seed-5/01-b/predictions.jsonl"
    path.write_text(path.read_text().replace('"base", "id": "0"', '"base", "id": "9"'))
    with pytest.raises(TaskDataError, match="predictions of different questions"):
        finished.paired(finished.runs("refined")[0])


# Attention on the memory


def test_queries_of_zero_share_attention_evenly(model, backbone, suite):
    """2 entries x 3 tokens against the t + 1 tokens that position t sees: the mass is 6 / (6 + t + 1)."""
    bundle = extracted_bundle(backbone, suite.tasks[0].train[:2], 3)
    example = suite.tasks[0].test[0]
    blind = Backbone.load(model)
    for layer in blind.attention_layers():
        torch.nn.init.zeros_(layer.q_proj.weight)
    prompt = blind.encode_example(example)
    keys = blind.retrieval_keys(prompt)
    answer = "north"
    length = prompt["input_ids"].shape[1] + len(blind.processor.tokenizer(answer)["input_ids"])
    expected = sum(6 / (6 + t + 1) for t in range(length)) / length
    # Beside a longer request, whose length is the batch's: padding is not counted.
    longer = "north north north north north"
    found = memory_masses(blind, bundle, [example, example], [answer, longer], keys.expand(2, -1))
    torch.testing.assert_close(found[0], torch.full((blind.num_layers,), expected).double(), rtol=0, atol=1e-6)
    assert (found[1] < found[0]).all()


# Orders and settings

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


# Retrieval


def memory(tasks: str, gate: Gate | None = None):
    """Entry i of task `tasks[i]` has the i-th unit vector for its key."""
    entries = tuple(EntryRecord(id=f"e{i}", task=task, source_digest="ab") for i, task in enumerate(tasks))
    keys = torch.eye(d)[: len(tasks)]
    return random_bundle(len(tasks), retrieval_keys=keys, entries=entries, weighting="prior", gate=gate)


def query(*similarities: float) -> torch.Tensor:
    """A key that has these similarities with the entries: [1, d]."""
    key = torch.zeros(1, d)
    key[0, : len(similarities)] = torch.tensor(similarities)
    return key


UNGATED = torch.zeros(1, 0)  # evidence


@pytest.mark.parametrize(
    ("task", "top_k", "hits", "retrieved", "is_cross_task"),
    [("a", 3, 1, 3, True), ("b", 3, 2, 3, False), ("a", 8, 2, 4, False)],  # b b a; half is no majority
)
def test_gap_and_hits_of_the_nearest_entries(task, top_k, hits, retrieved, is_cross_task):
    (found,) = retrievals(memory("abba"), query(0.1, 0.9, 0.7, 0.3), UNGATED, task, top_k=top_k)
    assert (found.gap, found.hits, found.retrieved) == (pytest.approx(0.2), hits, retrieved)
    assert found.is_cross_task is is_cross_task


def test_behind_a_gate_only_the_entries_of_its_task_are_retrieved():
    bundle = memory("abba", random_gate(weights=torch.eye(2, 8), thresholds=torch.tensor([0.8, 0.8])))
    evidence = torch.tensor([[0.9, 0.1], [0.5, 0.9], [0.1, 0.1]])
    evidence = torch.nn.functional.pad(evidence, (0, 6))  # [3, H]
    queries = torch.cat([query(0.3, 0.1, 0.9, 0.2), query(0.3, 0.9, 0.5, 0.2), query(0.9, 0.1, 0.1, 0.1)])
    to_a, to_b, closed = retrievals(bundle, queries, evidence, "a", top_k=8)
    assert to_a.gap == pytest.approx(0.1)  # of 0.3 and 0.2
    assert (to_a.hits, to_a.retrieved) == (2, 2)
    assert to_b.gap == pytest.approx(0.4)
    assert (to_b.hits, to_b.retrieved, to_b.is_cross_task) == (0, 2, True)
    assert closed is None


def answered(hits: int, retrieved: int, right: bool, plain: bool, gap: float = 0.0) -> Answered:
    return Answered("a", Retrieval(gap, hits, retrieved), right, plain)


def test_bins_of_the_hit_rate():
    low = [answered(0, 8, False, True), answered(1, 8, False, False)]
    exact = [answered(3, 5, True, False), answered(4, 5, True, False)]  # 0.6 and 0.8: not below them
    found = hit_rate_bins([*low, *exact, answered(8, 8, True, False), answered(7, 8, True, True)])
    assert [one["questions"] for one in found] == [2, 0, 0, 1, 3]
    assert [one["gain"]["mean"] for one in found] == [-0.5, None, None, 1.0, pytest.approx(2 / 3)]
    # Of -1 and 0: deviation sqrt(1/2), divided by sqrt(2).
    assert found[0]["gain"]["standard_error"] == pytest.approx(0.5)
    assert found[0]["accuracy"]["mean"] == 0.0
    assert found[0]["accuracy_without"]["mean"] == 0.5
    assert found[4]["accuracy"] == {"mean": 1.0, "standard_error": 0.0}
    assert math.isnan(found[3]["gain"]["standard_error"])


@pytest.fixture(scope="module")
def asked(demo_suite, demo_backbone, tmp_path_factory):
    """A memory of two entries of guild and one of field, over six questions that are answered as written here."""
    folder = tmp_path_factory.mktemp("results")
    data, suite = demo_suite(4, 1, 3, "guild", "field")
    examples = [*suite.tasks[0].train[:2], suite.tasks[1].train[0]]
    bundle = extracted_bundle(demo_backbone, examples, 1)
    base = {"base": [True] * 9}
    before = {"guild": [True] * 3, **base}
    write_configuration(folder, data, suite)
    after = {"guild": [True, True, False], "field": [True, False, False], **base}
    write_finished_run(folder, "paper", [before, after], suite=suite, bundles=[bundle, bundle])
    plain = {"guild": [False, True, False], "field": [True, True, True], **base}
    write_finished_run(folder, "no_memory", [before, plain], suite=suite)
    return folder


def test_the_hit_rate_of_all_entries_is_the_share_of_the_task(asked):
    found = diagnose("hit_rate", asked, "--method", "paper")
    # guild: 2 of 3 entries are its own, and field 1 of 3; gains 1, 0, 0 and 0, -1, -1.
    assert [one["questions"] for one in found["bins"]] == [0, 3, 0, 3, 0]
    assert found["bins"][1]["gain"]["mean"] == pytest.approx(-2 / 3, abs=1e-5)
    assert found["bins"][3]["gain"]["mean"] == pytest.approx(1 / 3, abs=1e-5)
    assert found["bins"][1]["accuracy_without"]["mean"] == 1.0
    assert found["closed"] == 0


@pytest.mark.parametrize("diagnostic", ["ambiguity", "diversity", "memory_attention"])
def test_the_others_write_theirs(diagnostic, asked):
    assert diagnose(diagnostic, asked, "--method", "paper")["method"] == "paper"


# Calibration and keys


def test_correlations_are_of_the_finite_pairs():
    # Ranks 1 2 3 4 against 1 2 4 3: rho = 1 - 6 * 2 / (4 * 15) = 0.8.
    found = correlation([1.0, 2.0, 3.0, 4.0, 5.0], [1.0, 2.0, 10.0, 3.0, math.nan])
    assert found["pairs"] == 4
    assert found["spearman"] == pytest.approx(0.8)
    # Deviations (-1.5, -0.5, 0.5, 1.5) and (-3, -2, 6, -1): their product's sum is 7, the sums of squares 5 and 50.
    assert found["pearson"] == pytest.approx(7 / math.sqrt(5 * 50))
    assert correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0])["pearson"] is None


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


def report(temperature: float, gates: list[float], anchors: float | None) -> dict:
    calibration = {"temperature": temperature, "value_gates": gates, "layer_bias": [0.0, -1.0]}
    return {"calibration": calibration, "history": [{"anchors": 9.0}, {"anchors": anchors}]}


def test_the_calibration_is_traced_with_its_gain_and_what_it_goes_with(tmp_path):
    write_configuration(tmp_path)
    reports = [report(0.07, [0.5, 0.5], None), report(0.2, [0.2, 0.6], 1.0), report(0.1, [0.1, 0.1], 4.0)]
    write_finished_run(tmp_path, "fixed_calibration", FIXED)
    write_finished_run(tmp_path, "paper", STREAM, reports=reports)
    found = diagnose("calibration", tmp_path)
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
