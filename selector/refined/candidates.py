"""The refined recipe's trainings of a new task, of which one is kept: by activation and learning rate.

Memory that acts later costs less to serve, because the prompt before it is the untouched model's, and some tasks are
better off with it; so the latest activation is kept that is not clearly worse than the best. Tasks that combine what
the model knows want a lower learning rate than tasks with new pictures: the latest activation, whose training is the
cheapest, is trained with each rate, and each earlier one with that of the best training so far. In deep models that may
be too high: an activation that ends worse than a later one is trained with the next lower rate too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from inducekv_vllm.activation import ACTIVATIONS, Activation
from inducekv_vllm.errors import BundleError, InduceKVError, TaskDataError

from ..backbone.injection import Memory
from ..backbone.scoring import Questions
from ..runtime.checkpoint import Checkpoint
from ..runtime.progress import progress_bar
from ..update.inputs import TaskInputs
from .entries import new_task
from .lr_search import LEARNING_RATES, Trial, own_entries, progress_text, require_storable, search_learning_rate
from .settings import RefinedSettings
from .training import StepRecord, train
from .training_problem import TrainingProblem

DECOUPLED_RATES: Final = (0.1, 0.3)


@dataclass(frozen=True)
class Candidate:
    """A finished training."""

    activation: Activation  # of the new task
    learning_rate: float
    memory: Memory
    history: tuple[StepRecord, ...]
    accuracy: float | None  # on the validation examples; None if there was one training alone
    validation_nll: float | None  # likewise
    trials: tuple[tuple[float, float | None], ...] = ()  # learning rates tried in part, and their validation losses


def train_candidates(
    prepare: Callable[[Activation], tuple[TrainingProblem, Questions]],
    settings: RefinedSettings,
    checkpoint: Checkpoint,
    progress: bool,
) -> list[Candidate]:
    """Train with every activation and learning rate to try; those that diverge are left out. Collective.

    Args:
        prepare: what is trained with an activation of the new task, and the validation questions.

    Raises:
        TaskDataError, BundleError: all of them diverge.
    """
    candidates: list[Candidate] = []
    failure: InduceKVError | None = None
    tried: list[list[list[int] | None]] = []
    for activation in reversed(activations_to_try(settings)):
        problem, validation = prepare(activation)
        positions = [_positions(each) for each in (problem.current.questions, validation)]
        if positions in tried:
            continue  # without pictures, "text" and "prompt" are the same
        tried.append(positions)
        for rates in _rates_to_try(settings, candidates):
            try:
                trials = search_learning_rate(problem, settings, rates, validation, checkpoint, progress)
                training = min(trials, key=_loss).training
                name = f"refinement-{activation}-{training.learning_rate}"
                with progress_bar("Training", settings.steps, progress) as advance:
                    train(training, checkpoint, name, after_step=lambda t: advance(t.step, progress_text(t)))
                memory = training.memory()
                require_storable(memory)
                accuracy = loss = None
                if settings.activation == "search" or (settings.form == "decoupled" and settings.learning_rate is None):
                    accuracy = problem.scorer.accuracy(validation, memory, own_entries(problem))
                    loss = problem.scorer.mean_loss(validation, memory, own_entries(problem))
            except (TaskDataError, BundleError) as error:
                failure = error
                continue
            tried_in_part = tuple((trial.learning_rate, trial.validation_nll) for trial in trials if len(trials) > 1)
            history = tuple(training.history)
            candidates.append(
                Candidate(activation, training.learning_rate, memory, history, accuracy, loss, tried_in_part)
            )
        if candidates and min(candidates, key=_loss).accuracy == 1:
            break  # none is better, and this is the latest
    if failure is not None and not candidates:
        raise failure
    return sorted(candidates, key=lambda candidate: ACTIVATIONS.index(candidate.activation))


def _positions(questions: Questions) -> list[int] | None:
    return None if questions.first_active is None else questions.first_active.tolist()


def _loss(tried: Candidate | Trial) -> float:
    return math.inf if tried.validation_nll is None else tried.validation_nll


def _rates_to_try(settings: RefinedSettings, candidates: Sequence[Candidate]) -> Iterator[tuple[float, ...]]:
    """The learning rates of an activation's next training; short trials choose among several.

    Args:
        candidates: so far; it grows while the trainings are made.
    """
    if settings.learning_rate is not None:
        yield (settings.learning_rate,)
    elif settings.form == "merged":
        yield LEARNING_RATES
    elif not candidates:
        yield from ((rate,) for rate in DECOUPLED_RATES)
    else:
        best = min(candidates, key=_loss)
        for rate in sorted((rate for rate in DECOUPLED_RATES if rate <= best.learning_rate), reverse=True):
            yield (rate,)
            if min(candidates, key=_loss) is not best:
                return


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
    """The best of the latest activation whose accuracy is within one standard error of the best of all.

    The standard error of a share p of n answers is sqrt(p (1 - p) / n). An activation's best is that of the least loss.
    """
    by_activation: dict[Activation, Candidate] = {}
    for candidate in candidates:
        best = by_activation.setdefault(candidate.activation, candidate)
        if _loss(candidate) < _loss(best):
            by_activation[candidate.activation] = candidate
    highest = max(candidate.accuracy or 0.0 for candidate in by_activation.values())
    least = highest - math.sqrt(highest * (1 - highest) / num_questions) if num_questions else 0.0
    return [c for c in by_activation.values() if (c.accuracy or 0.0) >= least][-1]
