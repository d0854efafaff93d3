"""The refined recipe's search for a learning rate.

Shapes: K entries of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from inducekv_vllm.errors import BundleError, InduceKVError, TaskDataError

from ..backbone.injection import Memory
from ..backbone.scoring import Questions
from ..runtime.checkpoint import Checkpoint
from ..runtime.progress import progress_bar
from .settings import RefinedSettings
from .training import PAYLOADS, Training, train
from .training_problem import TrainingProblem

LEARNING_RATES: Final = (0.15, 0.3, 0.6)
TRIAL_SHARE: Final = 0.25  # of the steps, for each learning rate


@dataclass(frozen=True)
class Trial:
    """A learning rate, its validation loss, and the training so far."""

    learning_rate: float
    validation_nll: float | None  # None: it diverged, or there was no search
    training: Training


def search_learning_rate(
    problem: TrainingProblem,
    settings: RefinedSettings,
    rates: Sequence[float],
    validation: Questions,
    checkpoint: Checkpoint,
    progress: bool,
) -> list[Trial]:
    """Train with each of `rates` for part of the whole run's schedule: a schedule of its own favours high rates.

    One rate alone is not tried.

    Raises:
        TaskDataError, BundleError: training diverges with every learning rate.
    """
    if len(rates) == 1:
        return [Trial(rates[0], None, Training(problem, settings, rates[0]))]
    steps = math.ceil(TRIAL_SHARE * settings.steps)
    trials: list[Trial] = []
    failure: InduceKVError | None = None
    with progress_bar("Searching the learning rate", steps * len(rates), progress) as advance:
        for number, rate in enumerate(rates):

            def report(training: Training, done: int = number * steps) -> None:
                advance(done + training.step, progress_text(training))

            training = Training(problem, settings, rate)
            try:
                train(training, checkpoint, f"trial-{rate}", until=steps, after_step=report)
                memory = training.memory()
                require_storable(memory)
                trials.append(Trial(rate, validation_loss(problem, validation, memory), training))
            except (TaskDataError, BundleError) as error:  # this rate diverges
                failure = error
                trials.append(Trial(rate, None, training))
    if failure is not None and all(trial.validation_nll is None for trial in trials):
        raise failure
    return trials


def require_storable(memory: Memory) -> None:
    """Raises BundleError: a payload is outside the range of float16."""
    limit = torch.finfo(torch.float16).max
    for name in PAYLOADS:
        tensor: Tensor | None = getattr(memory, name)
        if tensor is None:
            continue
        largest = float(tensor.abs().max())
        if largest > limit:
            raise BundleError(
                f"refined {name} reach {largest:.4g}, a bundle's float16 holds {limit:.4g}: lower the rate"
            )


def progress_text(training: Training) -> str:
    checked = f", {training.checks[-1]:.3f} on validation" if training.checks else ""
    return f"NLL {training.history[-1].current:.3f}{checked}" if training.history else ""


def validation_loss(problem: TrainingProblem, validation: Questions, memory: Memory) -> float:
    """Mean NLL of the validation examples with their own task's entries."""
    return problem.scorer.mean_loss(validation, memory, own_entries(problem))


def own_entries(problem: TrainingProblem) -> Tensor:
    """A retrieval prior that leaves the new task's own entries alone: [K] float32, 0 or -inf."""
    own = (problem.current.log_prior > -math.inf).any(dim=0)  # [K] bool
    return torch.zeros(len(own)).masked_fill(~own, -math.inf)
