"""The bilevel problem (paper, Algorithm 1): alternate calibration steps and projected steps on the selection weights.

Shapes: N candidates, B budget, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import TaskDataError

from ..update.coverage import Coverage
from .calibration import Calibration, leaf
from .settings import SelectionSettings
from .simplex import effective_entries, project, support_size, top_b


class Losses(Protocol):
    """L_cur and L_anc as functions of w [N] float64, phi [1 + L] float64 and the number of a batch: []."""

    def current_loss(self, weights: Tensor, phi: Tensor, batch: tuple[int, ...]) -> Tensor: ...

    def anchor_loss(self, weights: Tensor, phi: Tensor, batch: tuple[int, ...]) -> Tensor: ...


@dataclass(frozen=True)
class IterationRecord:
    """Losses before an iteration's outer step, and the weights' support after it."""

    objective: float  # J(w) on the iteration's batches
    current: float
    anchors: float | None  # without anchors there is none
    coverage: float
    temperature: float
    value_gate: float  # mean over the layers
    support: int  # entries with any weight, after the step
    effective: float  # (sum w)^2 / sum w^2, after the step


@dataclass(frozen=True)
class SelectionState:
    """Weights and calibration after some iterations."""

    weights: Tensor  # [N] float64: w
    calibration: Calibration
    iteration: int = 0
    history: tuple[IterationRecord, ...] = field(default=())

    @classmethod
    def initial(cls, num_candidates: int, budget: int, calibration: Calibration) -> SelectionState:
        """Uniform weights, and the calibration to start from."""
        return cls(torch.full((num_candidates,), budget / num_candidates, dtype=torch.float64), calibration)

    def selected(self, budget: int) -> Tensor:
        """TopB(w): [min(B, N)] int64, in increasing order."""
        return top_b(self.weights, budget)

    def collapsed(self, budget: int) -> bool:
        """Whether fewer than B candidates have any weight: the order of the pool then decides the rest of TopB."""
        return support_size(self.weights) < min(budget, len(self.weights))


@dataclass(frozen=True)
class SelectionResult:
    """The optimisation for one pair (beta, gamma), and its rounding to a bundle."""

    beta: float
    gamma: float
    state: SelectionState
    bundle: Bundle
    validation_loss: float | None  # of the bundle


@dataclass(frozen=True)
class SelectionProblem:
    """Minimise J(w) = L_cur + beta L_anc + gamma Omega over the budget simplex."""

    losses: Losses
    coverage: Coverage  # Omega
    settings: SelectionSettings
    beta: float
    gamma: float
    has_anchors: bool


def select(
    problem: SelectionProblem,
    state: SelectionState,
    *,
    after_iteration: Callable[[SelectionState], None] = lambda state: None,
) -> SelectionState:
    """Optimise from `state` to the last iteration.

    Args:
        after_iteration: is called with each new state.

    Raises:
        TaskDataError: a loss or its gradient is not finite.
    """
    while state.iteration < problem.settings.iterations:
        state = iterate(problem, state)
        after_iteration(state)
    return state


def iterate(problem: SelectionProblem, state: SelectionState) -> SelectionState:
    """One outer iteration: J inner steps on phi, then a projected step on w."""
    losses, settings, coverage = problem.losses, problem.settings, problem.coverage
    iteration, w = state.iteration, leaf(state.weights)

    def inner_loss(phi: Tensor, step: int) -> Tensor:
        return losses.current_loss(state.weights, phi, (iteration, step))

    calibration = state.calibration
    calibration.fit(inner_loss, settings.inner_steps)
    phi = calibration.phi
    batch = (iteration, settings.inner_steps)
    current = losses.current_loss(w, phi, batch).double()
    anchors = losses.anchor_loss(w, phi, batch).double() if problem.has_anchors else None
    likelihood = current if anchors is None else current + problem.beta * anchors
    (gradient,) = torch.autograd.grad(likelihood, w)
    if not (likelihood.isfinite() and gradient.isfinite().all()):
        raise TaskDataError(f"the loss or its gradient is not finite in iteration {iteration}; nothing was written")

    nll, spread = float(likelihood.detach()), float(coverage.value(state.weights))
    if problem.gamma:
        gradient = gradient + problem.gamma * coverage.gradient(state.weights)
    weights = outer_step(state.weights, gradient, settings)
    record = IterationRecord(
        objective=nll + problem.gamma * spread,
        current=float(current.detach()),
        anchors=None if anchors is None else float(anchors.detach()),
        coverage=spread,
        temperature=float(calibration.temperature),
        value_gate=float(calibration.value_gates.mean()),
        support=support_size(weights),
        effective=effective_entries(weights),
    )
    return replace(state, weights=weights, iteration=iteration + 1, history=(*state.history, record))


def outer_step(weights: Tensor, gradient: Tensor, settings: SelectionSettings) -> Tensor:
    """w - step * gradient, projected onto the budget simplex: [N] float64."""
    return project(weights - settings.outer_step * gradient, settings.budget)
