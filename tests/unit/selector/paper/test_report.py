"""What rounding costs, against the same by hand."""

import pytest
import torch

from selector.paper.report import rounding


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
