"""The report's numbers, against what they are by hand or by another library."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from inducekv_vllm.bundle import EntryRecord
from selector.runtime.process_memory import status_bytes
from selector.update import measures as report
from selector.update.measures import Phases, composition, diversity, retrieval_divergence, rounding


def test_rounding_by_hand() -> None:
    weights = torch.tensor([0.5, 0.0, 1.5, 0.0], dtype=torch.float64)
    found = rounding(weights, torch.tensor([0, 1, 2]))
    assert found["mass_captured"] == 1
    assert found["selected_without_weight"] == 1
    assert found["support"] == 2
    assert found["collapsed"]
    assert found["effective_entries"] == pytest.approx(4 / 2.5)
    half = rounding(weights, torch.tensor([2]))
    assert half["mass_captured"] == 0.75
    assert not half["collapsed"]


def test_divergence_is_that_of_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    relaxed, deployed = torch.rand(4, 9, generator=generator), torch.rand(4, 3, generator=generator)
    relaxed, deployed = relaxed / relaxed.sum(1, keepdim=True), deployed / deployed.sum(1, keepdim=True)
    selected = torch.tensor([1, 4, 8])
    full = np.zeros((4, 9))
    full[:, selected] = deployed
    expected = np.mean([jensenshannon(p, q) ** 2 for p, q in zip(relaxed.numpy(), full, strict=True)])
    assert retrieval_divergence(relaxed, deployed, selected) == pytest.approx(expected, rel=1e-5)


def test_divergence_lies_between_its_ends() -> None:
    only = torch.tensor([[0.0, 1.0, 0.0]])
    assert retrieval_divergence(only, torch.ones(1, 1), torch.tensor([1])) == 0
    assert retrieval_divergence(only, torch.ones(1, 1), torch.tensor([0])) == pytest.approx(math.log(2))


def test_diversity_of_orthogonal_and_of_equal_keys() -> None:
    apart, alike = diversity(torch.eye(4)), diversity(torch.eye(4)[[0, 0, 0, 0]])
    assert apart["cosine_mean"] == 0
    assert alike["cosine_quantiles"]["0.5"] == 1
    assert apart["logdet"] == pytest.approx(4 * math.log(1 / 4 + 1e-3))
    assert apart["logdet"] > alike["logdet"]
    assert sum(apart["cosine_histogram"]["counts"]) == sum(alike["cosine_histogram"]["counts"]) == 6
    assert set(diversity(torch.eye(4)[:1])) == {"logdet"}


def test_composition_counts_tasks() -> None:
    records = [EntryRecord(id=str(i), task=task, source_digest="x") for i, task in enumerate("aabca")]
    assert composition(records) == {"a": 3, "b": 1, "c": 1}


def test_phases_are_timed() -> None:
    phases = Phases()
    with phases.phase("one"):
        pass
    assert phases.records[0]["name"] == "one"
    assert phases.records[0]["peak_bytes"] > 2**20


def test_a_phase_has_its_own_peak_where_the_system_permits_it() -> None:
    """A phase that takes 256 MiB, and one after it that takes nothing."""
    phases = Phases()
    with phases.phase("large"):
        torch.ones(2**26)
    with phases.phase("small"):
        pass
    large, small = phases.records
    assert large["peak_of"] == small["peak_of"]
    if large["peak_of"] == "phase":
        assert large["peak_bytes"] > small["peak_bytes"] + 2**27
    else:
        assert large["peak_bytes"] == small["peak_bytes"]


def test_a_peak_that_cannot_be_reset_is_said_to_be_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "reset_peak", lambda: False)
    phases = Phases()
    with phases.phase("one"):
        pass
    assert phases.records[0]["peak_of"] == "process"


def test_memory_is_what_the_system_says() -> None:
    resident = status_bytes("VmRSS")
    kept = torch.ones(2**24)  # 64 MiB
    assert resident + 2**25 < status_bytes("VmRSS") <= status_bytes("VmHWM")
    assert len(kept)
