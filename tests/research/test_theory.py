"""The checks of the paper's theory find what is wrong, and the page says what they found."""

import json
from pathlib import Path

import pytest
import torch

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


def test_the_recorded_results_say_what_the_documentation_says() -> None:
    found = json.loads(theory.RESULTS.read_text())
    page = (Path(__file__).parents[2] / "docs" / "results.md").read_text()
    violated = found["convexity_of_the_likelihood"]["violated_share"]
    assert f"{100 * violated:.0f}% of pairs" in page
    assert all(each["holds"] for each in (*found["static_regret"], *found["dynamic_regret"], found["rounding"]))
