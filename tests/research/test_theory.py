"""The checks of the paper's theory find what is wrong, and agree with brute force."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.research.theory import __main__ as theory
from selector.update.coverage import Coverage


@pytest.fixture
def generator() -> torch.Generator:
    torch.manual_seed(3)
    return torch.Generator().manual_seed(3)


def test_a_wrong_projection_is_found(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert theory.projection(generator)["holds"]
    monkeypatch.setattr(theory, "project", lambda x, total: total * x.clamp(min=0) / x.clamp(min=0).sum())
    found = theory.projection(generator)
    assert not found["holds"]
    assert found["furthest_from_a_general_solver"] > 0.01


def test_a_wrong_gradient_is_found(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert theory.log_det(generator)["formula_against_automatic_gradient"] < 1e-12
    right = Coverage.gradient
    monkeypatch.setattr(Coverage, "gradient", lambda self, w: -right(self, w))
    assert theory.log_det(generator)["formula_against_automatic_gradient"] > 1e-3


def test_a_step_that_climbs_has_more_regret_than_the_bound(
    generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    descend = theory.descend
    # The same loss in every task, so that the best fixed point is far from the worst.
    monkeypatch.setattr(
        theory, "tasks", lambda g, count, gamma, drift: [(torch.arange(theory.N).double(), 0.0)] * count
    )
    assert theory.regret(generator, 256, 0.0)["holds"]
    monkeypatch.setattr(theory, "descend", lambda stream, coverage, eta: descend(stream, coverage, -eta))
    assert not theory.regret(generator, 256, 0.0)["holds"]


@pytest.mark.parametrize("gamma", [0.0, 0.1])
def test_no_point_is_better_than_the_comparator(generator: torch.Generator, gamma: float) -> None:
    loss = torch.rand(theory.N, generator=generator, dtype=torch.float64)
    coverage = Coverage.of_keys(theory.keys(generator), theory.B)
    task = (loss, gamma)
    least = theory.value(task, theory.best_fixed([task], coverage), coverage)
    w = torch.full((theory.N,), theory.B / theory.N, dtype=torch.float64)
    for _ in range(3000):
        w = theory.project(w - 0.02 * (loss + gamma * coverage.gradient(w)), theory.B)
    assert least <= theory.value(task, w, coverage) + 1e-6
    others = [theory.point(generator, spread=0.1) for _ in range(300)]
    assert least <= min(theory.value(task, other, coverage) for other in others)


def test_the_likelihood_is_not_convex_by_hand() -> None:
    """Two entries of two values: as much weight on either is worse than the mean of all on one and all on the other."""
    values: Tensor = torch.tensor([[6.0, 0.0], [0.0, 6.0]], dtype=torch.float64)
    similarity = torch.tensor([0.0, 2.0], dtype=torch.float64)

    def loss(share: float) -> float:
        w = torch.tensor([share, 1 - share], dtype=torch.float64)
        return float(theory.attention_loss(w, similarity, values, 0, 1.0))

    alpha = 0.5 / (0.5 + 0.5 * math.exp(2))
    assert loss(0.5) == pytest.approx(math.log(1 + math.exp(6 - 12 * alpha)))
    assert loss(0.5) > (loss(1.0) + loss(0.0)) / 2


def test_the_recorded_results_say_what_the_documentation_says() -> None:
    found = json.loads(theory.RESULTS.read_text())
    page = (Path(__file__).parents[2] / "docs" / "results.md").read_text()
    violated = found["convexity_of_the_likelihood"]["violated_share"]
    assert f"{100 * violated:.0f}% of pairs" in page
    assert all(each["holds"] for each in (*found["static_regret"], *found["dynamic_regret"], found["rounding"]))
