"""The refined recipe's choice of the position from which the new task's memory acts.

A later one costs less to serve, because the prompt before it is the untouched model's, and some tasks are better off
with it; so the latest is kept that is not clearly worse than the best.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inducekv_vllm.activation import ACTIVATIONS, Activation
from inducekv_vllm.bundle import Bundle

from ..update.inputs import TaskInputs
from .entries import new_task
from .lr_search import Trial
from .settings import RefinedSettings
from .training import Training


@dataclass(frozen=True)
class Candidate:
    """A finished training with one activation of the new task."""

    activation: Activation
    learning_rate: float
    bundle: Bundle
    training: Training
    trials: tuple[Trial, ...]  # of the learning rate
    accuracy: float | None  # on the validation examples; None if there is one candidate


def activations_to_try(settings: RefinedSettings) -> tuple[Activation, ...]:
    """Earliest first."""
    return ACTIVATIONS if settings.activation == "search" else (settings.activation,)


def activations_by_task(
    inputs: TaskInputs, settings: RefinedSettings, tasks: Collection[str], new: Activation
) -> dict[str, Activation]:
    """That of each of `tasks`, those of the next memory; empty for merged memory."""
    if settings.form == "merged":
        return {}
    earlier = inputs.previous.metadata.activations if inputs.previous is not None else {}
    known = {**earlier, new_task(inputs.training): new}
    return {task: known[task] for task in tasks}


def latest_good(candidates: Sequence[Candidate], num_questions: int) -> Candidate:
    """The last candidate whose accuracy on n questions is within one standard error of the best one's.

    The standard error of a share p of n answers is sqrt(p (1 - p) / n).
    """
    if len(candidates) == 1:
        return candidates[0]
    accuracies = [candidate.accuracy or 0.0 for candidate in candidates]
    best = max(accuracies)
    least = best - math.sqrt(best * (1 - best) / num_questions)
    return [c for c, accuracy in zip(candidates, accuracies, strict=True) if accuracy >= least][-1]
