"""Gain by retrieval ambiguity and by hit rate, on memories and answers whose numbers are computed by hand."""

import math

import pytest
import torch

from benchmarks.research.continual.diagnostics.retrieval import Answered, Retrieval, hit_rate_bins, retrievals
from inducekv_vllm.bundle import EntryRecord, Gate
from tests.bundles import d, random_bundle, random_gate
from tests.research.extracted import extracted_bundle
from tests.research.finished_runs import diagnose, refusal, write_configuration, write_finished_run


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
def out(demo_suite, demo_backbone, tmp_path_factory):
    """A memory of two entries of guild and one of field, over six questions that are answered as written here."""
    folder = tmp_path_factory.mktemp("results")
    data, suite = demo_suite(4, 1, 3, "guild", "field")
    examples = [*suite.tasks[0].train[:2], suite.tasks[1].train[0]]
    bundle = extracted_bundle(demo_backbone, examples, payload_tokens=1)
    base = {"base": [True] * 9}
    before = {"guild": [True] * 3, **base}
    write_configuration(folder, data, suite)
    after = {"guild": [True, True, False], "field": [True, False, False], **base}
    write_finished_run(folder, "paper", [before, after], suite=suite, bundles=[bundle, bundle])
    plain = {"guild": [False, True, False], "field": [True, True, True], **base}
    write_finished_run(folder, "no_memory", [before, plain], suite=suite)
    return folder, suite, bundle


def test_the_hit_rate_of_all_entries_is_the_share_of_the_task(out, capsys):
    found = diagnose("hit_rate", out[0], "--method", "paper")
    # guild: 2 of 3 entries are its own, and field 1 of 3; gains 1, 0, 0 and 0, -1, -1.
    assert [one["questions"] for one in found["bins"]] == [0, 3, 0, 3, 0]
    assert found["bins"][1]["gain"]["mean"] == pytest.approx(-2 / 3, abs=1e-5)
    assert found["bins"][3]["gain"]["mean"] == pytest.approx(1 / 3, abs=1e-5)
    assert found["bins"][1]["accuracy_without"]["mean"] == 1.0
    assert found["closed"] == 0
    message = refusal(capsys, "hit_rate", out[0], "--method", "paper", "--top-k", 0)
    assert "top_k must be at least 1, found 0" in message
