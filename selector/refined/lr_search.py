"""The refined recipe's search for a learning rate.

Letters: K entries of the memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from inducekv_vllm.errors import BundleError, InduceKVError, TaskDataError

from ..backbone.injection import Memory
from ..backbone.scoring import Questions
from ..runtime.checkpoint import Checkpoint
from ..runtime.distributed import is_main
from ..runtime.progress import progress_bar
from ..update.inputs import TaskInputs
from .entries import QueryKeys
from .settings import RefinedSettings
from .training import Lesson, RefinementState, refine

LEARNING_RATES: Final = (0.15, 0.3, 0.6)  # searched on validation
TRIAL_SHARE: Final = 0.25  # of the steps, that each learning rate gets in the search


@dataclass(frozen=True)
class Trial:
    """A learning rate, how it did on the validation examples, and how far it got."""

    learning_rate: float
    validation_nll: float | None  # None: it diverged, or was not searched
    state: RefinementState | None


def search(
    lesson: Lesson,
    inputs: TaskInputs,
    known: QueryKeys,
    settings: RefinedSettings,
    checkpoint: Checkpoint,
    progress: bool,
) -> list[Trial]:
    """Each learning rate for part of the way along the whole run's schedule: a short run would favour high rates."""
    if settings.learning_rate is not None:
        return [Trial(settings.learning_rate, None, None)]
    steps = math.ceil(TRIAL_SHARE * settings.steps)
    trials: list[Trial] = []
    failure: InduceKVError | None = None
    with progress_bar("Searching the learning rate", steps * len(LEARNING_RATES), progress and is_main()) as advance:
        for number, rate in enumerate(LEARNING_RATES):

            def show(state: RefinementState, done: int = number * steps) -> None:
                advance(done + state.step, shown(state))

            chosen = settings.refinement(rate)
            try:
                state = refine(lesson, chosen, checkpoint, f"trial-{rate}", until=steps, after_step=show)
                memory = state.memory(lesson)
                require_storable(memory)
                trials.append(Trial(rate, _validation_loss(lesson, inputs, known, memory), state))
            except (TaskDataError, BundleError) as error:  # it diverged, with this rate
                failure = error
                trials.append(Trial(rate, None, None))
    if failure is not None and all(trial.state is None for trial in trials):
        raise failure
    return trials


def require_storable(memory: Memory) -> None:
    """Raises BundleError: a payload has left the range of float16."""
    limit = torch.finfo(torch.float16).max
    for name in ("payload_keys", "payload_values"):
        largest = float(getattr(memory, name).abs().max())
        if largest > limit:
            raise BundleError(
                f"refined {name} reach {largest:.4g}, a bundle's float16 holds {limit:.4g}: lower the rate"
            )


@torch.no_grad()
def _validation_loss(lesson: Lesson, inputs: TaskInputs, known: QueryKeys, memory: Memory) -> float:
    """Mean NLL of the validation examples with their own task's entries."""
    own = (lesson.current.log_prior > -math.inf).any(dim=0)  # [K] bool
    prior = torch.zeros(len(own)).masked_fill(~own, -math.inf)
    return lesson.scorer.mean_loss(Questions(inputs.validation, known.validation[:, 0]), memory, prior)


def shown(state: RefinementState) -> str:
    return f"NLL {state.history[-1].current:.3f}" if state.history else ""
