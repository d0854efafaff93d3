"""The bilevel problem: alternate between calibration and projected steps on the selection weights (Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from inducekv_vllm.errors import ConfigError, TaskDataError

from ..runtime.checks import require_at_least, require_choice, require_positive
from ..update.coverage import Coverage
from .calibration import INNER_STEPS, Calibration, fit, leaf, penalty
from .simplex import effective_entries, project, support_size, top_b

Coupling = Literal["bilevel", "single-level"]
Hypergradient = Literal["alternating", "unrolled"]
StepRule = Literal["plain", "normalized"]


class Losses(Protocol):
    """L_cur and L_anc as functions of w [N] float64, phi [1 + L] float64 and the number of a batch: []."""

    def current_loss(self, weights: Tensor, phi: Tensor, batch: tuple[int, ...]) -> Tensor: ...

    def anchor_loss(self, weights: Tensor, phi: Tensor, batch: tuple[int, ...]) -> Tensor: ...


@dataclass(frozen=True)
class SelectionSettings:
    """The outer problem's settings, the paper's by default; raises `ConfigError` for values out of range."""

    budget: int  # B
    beta: float
    gamma: float
    iterations: int = 100  # I
    inner_steps: int = INNER_STEPS  # J
    outer_step: float = 0.1
    # "single-level" (the paper's ablation) has no inner problem, and `inner_steps` has no part in it: in an iteration w
    # and phi take one step each, along the gradient of one loss, that of the outer problem with phi's penalty.
    coupling: Coupling = "bilevel"
    # How phi depends on w in the outer gradient: not at all, or through the iteration's own inner steps.
    hypergradient: Hypergradient = "alternating"
    # "normalized" moves no weight by more than `outer_step` times the uniform weight B / N in an iteration.
    step_rule: StepRule = "plain"

    def __post_init__(self) -> None:
        require_at_least(1, budget=self.budget)
        require_at_least(0, iterations=self.iterations, inner_steps=self.inner_steps, beta=self.beta, gamma=self.gamma)
        require_positive(outer_step=self.outer_step)
        require_choice(Coupling, coupling=self.coupling)
        require_choice(Hypergradient, hypergradient=self.hypergradient)
        require_choice(StepRule, step_rule=self.step_rule)
        if self.coupling == "single-level" and self.hypergradient == "unrolled":
            raise ConfigError("a single-level update has no inner steps to unroll: use the alternating hypergradient")


@dataclass(frozen=True)
class Measured:
    """One iteration, before its outer step."""

    objective: float  # J(w) on the iteration's batches
    current: float
    anchors: float | None  # without anchors there is none
    coverage: float
    temperature: float
    value_gate: float  # mean over the layers
    support: int  # entries with any weight, after the step
    effective: float  # (sum w)^2 / sum w^2, after the step

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class SelectionState:
    """Everything an interrupted run needs to go on exactly as if it had not been."""

    weights: Tensor  # [N] float64: w
    calibration: Calibration
    iteration: int = 0
    history: tuple[Measured, ...] = field(default=())

    @classmethod
    def initial(cls, num_candidates: int, budget: int, calibration: Calibration) -> SelectionState:
        """Uniform weights, and the calibration to start from."""
        return cls(torch.full((num_candidates,), budget / num_candidates, dtype=torch.float64), calibration)

    def selected(self, budget: int) -> Tensor:
        """TopB(w): [min(B, N)] int64, rising."""
        return top_b(self.weights, budget)

    def collapsed(self, budget: int) -> bool:
        """Whether w has too few entries left to name B of them: the rest of TopB is then settled by order alone."""
        return support_size(self.weights) < min(budget, len(self.weights))


def select(
    losses: Losses,
    coverage: Coverage,
    settings: SelectionSettings,
    state: SelectionState,
    *,
    has_anchors: bool,
    after_iteration: Callable[[SelectionState], None] = lambda state: None,
) -> SelectionState:
    """Run the iterations that `state` still lacks; `after_iteration` may store each new state.

    Raises:
        TaskDataError: a loss or its gradient is not finite.
    """
    while state.iteration < settings.iterations:
        state = iterate(losses, coverage, settings, state, has_anchors=has_anchors)
        after_iteration(state)
    return state


def iterate(
    losses: Losses, coverage: Coverage, settings: SelectionSettings, state: SelectionState, *, has_anchors: bool
) -> SelectionState:
    """One outer iteration: J inner steps on phi, one projected step on w; or one step of both together."""
    iteration, w = state.iteration, leaf(state.weights)
    if settings.coupling == "bilevel":
        calibration = fit_inner(losses, settings, state, w)
    else:
        calibration = replace(state.calibration, phi=leaf(state.calibration.phi))
    batch = (iteration, settings.inner_steps)
    current = losses.current_loss(w, calibration.phi, batch).double()
    anchors = losses.anchor_loss(w, calibration.phi, batch).double() if has_anchors else None
    likelihood = current if anchors is None else current + settings.beta * anchors
    if settings.coupling == "bilevel":
        (gradient,) = torch.autograd.grad(likelihood, w)
    else:
        gradient, slope = torch.autograd.grad(likelihood + penalty(calibration.phi), (w, calibration.phi))
        calibration = calibration.detached().stepped(slope)
    if not (likelihood.isfinite() and gradient.isfinite().all()):
        raise TaskDataError(f"the loss or its gradient is not finite in iteration {iteration}; nothing was written")

    fitted, spread = float(likelihood.detach()), float(coverage.value(state.weights))
    if settings.gamma:
        gradient = gradient + settings.gamma * coverage.gradient(state.weights)
    weights = outer_step(state.weights, gradient, settings)
    calibration = calibration.detached()
    measured = Measured(
        objective=fitted + settings.gamma * spread,
        current=float(current.detach()),
        anchors=None if anchors is None else float(anchors.detach()),
        coverage=spread,
        temperature=float(calibration.temperature),
        value_gate=float(calibration.value_gates.mean()),
        support=support_size(weights),
        effective=effective_entries(weights),
    )
    return replace(
        state,
        weights=weights,
        calibration=calibration,
        iteration=iteration + 1,
        history=(*state.history, measured),
    )


def fit_inner(losses: Losses, settings: SelectionSettings, state: SelectionState, w: Tensor) -> Calibration:
    """phi after the iteration's J inner steps, as a function of `w` [N] where the hypergradient is unrolled."""
    unrolled = settings.hypergradient == "unrolled"

    def inner_loss(phi: Tensor, step: int) -> Tensor:
        return losses.current_loss(w if unrolled else state.weights, phi, (state.iteration, step))

    return fit(state.calibration, inner_loss, settings.inner_steps, differentiable=unrolled)


def outer_step(weights: Tensor, gradient: Tensor, settings: SelectionSettings) -> Tensor:
    """w - step * gradient, projected onto the budget simplex: [N] float64."""
    if settings.step_rule == "normalized":
        # The mean moves nothing on the simplex; what is left is scaled to the uniform weight.
        gradient = gradient - gradient.mean()
        largest = gradient.abs().max()
        uniform = settings.budget / len(weights)
        gradient = gradient * (uniform / largest) if largest > 0 else gradient
    return project(weights - settings.outer_step * gradient, settings.budget)
