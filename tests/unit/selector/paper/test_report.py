"""What rounding costs, against the same by hand and by scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from selector.paper.report import retrieval_divergence, rounding


def test_rounding_by_hand() -> None:
    weights = torch.tensor([0.5, 0.0, 1.5, 0.0], dtype=torch.float64)
    kept = rounding(weights, torch.tensor([0, 1, 2]))
    assert kept["mass_captured"] == 1
    assert kept["selected_without_weight"] == 1
    assert kept["support"] == 2
    assert kept["collapsed"]
    assert kept["effective_entries"] == pytest.approx(4 / 2.5)
    half = rounding(weights, torch.tensor([2]))
    assert half["mass_captured"] == 0.75
    assert not half["collapsed"]


def test_divergence_is_that_of_scipy() -> None:
    generator = torch.Generator().manual_seed(0)
    relaxed, rounded = torch.rand(4, 9, generator=generator), torch.rand(4, 3, generator=generator)
    relaxed, rounded = relaxed / relaxed.sum(1, keepdim=True), rounded / rounded.sum(1, keepdim=True)
    selected = torch.tensor([1, 4, 8])
    full = np.zeros((4, 9))
    full[:, selected] = rounded
    expected = np.mean([jensenshannon(p, q) ** 2 for p, q in zip(relaxed.numpy(), full, strict=True)])
    assert retrieval_divergence(relaxed, rounded, selected) == pytest.approx(expected, rel=1e-5)
