"""The bilevel loop on small analytic problems: descent and collapse."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from inducekv_vllm.errors import TaskDataError
from selector.paper.bilevel import SelectionProblem, SelectionState, iterate, outer_step, select
from selector.paper.calibration import Calibration
from selector.paper.settings import SelectionSettings
from selector.update.coverage import Coverage
from tests.unit.selector.exact import unit_vectors

N, LAYERS, BUDGET = 10, 2, 3
SETTINGS = SelectionSettings(budget=BUDGET, iterations=20, inner_steps=3)


@dataclass(frozen=True)
class Analytic:
    """Losses in which w and phi meet in one product, so that the best phi depends on w."""

    scale: float = 1.0

    def current_loss(self, weights: Tensor, phi: Tensor, batch: tuple[int, ...]) -> Tensor:
        merit = torch.linspace(0, 1, N, dtype=torch.float64)
        return self.scale * ((merit @ weights - phi.sum()) ** 2 + torch.cosh(phi).sum() + 0.01 * batch[-1])

    def anchor_loss(self, weights: Tensor, phi: Tensor, batch: tuple[int, ...]) -> Tensor:
        return (weights[0] - 1) ** 2 + phi[0] * weights[1]


def coverage() -> Coverage:
    return Coverage.of_keys(unit_vectors(N, 6, dtype=torch.float64), BUDGET)


def problem(scale: float = 1.0, **changes: Any) -> SelectionProblem:
    return replace(SelectionProblem(Analytic(scale), coverage(), SETTINGS, 0.3, 0.1, has_anchors=True), **changes)


def start() -> SelectionState:
    return SelectionState.initial(N, BUDGET, Calibration(LAYERS))


def test_the_objective_falls_and_w_stays_on_the_simplex() -> None:
    state = select(problem(), start())
    assert state.iteration == len(state.history) == 20
    assert state.history[-1].objective < state.history[0].objective
    assert float(state.weights.sum()) == pytest.approx(BUDGET)
    assert (state.weights >= 0).all()


def test_two_runs_are_the_same_to_the_bit() -> None:
    one, other = (select(problem(), start()) for _ in range(2))
    assert torch.equal(one.weights, other.weights)
    assert torch.equal(one.calibration.phi, other.calibration.phi)
    assert one.history == other.history


def test_alternation_takes_the_plain_partial_gradient() -> None:
    state = iterate(problem(), start())
    w = start().weights.clone().requires_grad_()
    phi = state.calibration.phi
    loss = Analytic().current_loss(w, phi, (0, 3)) + 0.3 * Analytic().anchor_loss(w, phi, (0, 3))
    (gradient,) = torch.autograd.grad(loss + 0.1 * coverage().value(w), w)
    torch.testing.assert_close(state.weights, outer_step(start().weights, gradient, SETTINGS))


def test_a_steep_loss_collapses() -> None:
    plain = select(problem(scale=50, has_anchors=False), start())
    assert plain.collapsed(BUDGET)
    assert plain.history[-1].support < BUDGET


def test_a_loss_that_is_no_number_stops_the_run() -> None:
    with pytest.raises(TaskDataError, match="not finite in iteration 0"):
        select(problem(scale=float("nan"), has_anchors=False), start())
