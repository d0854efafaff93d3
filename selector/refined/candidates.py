"""The refined recipe's trainings of a new task, of which one is kept: by activation and learning rate.

Memory that acts later costs less to serve, because the prompt before it is the untouched model's, and some tasks are
better off with it; so the latest activation is kept that is not clearly worse than the best. Tasks that combine what
the model knows want a lower learning rate than tasks with new pictures: the latest activation, whose training is the
cheapest, is trained with each rate, and each earlier one with that of the best training so far. In deep models that may
be too high: an activation that ends worse than a later one is trained with the next lower rate too.

With a patience, a training that answers every validation question right is the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from inducekv_vllm.bundle.activation import ACTIVATIONS, Activation
from inducekv_vllm.errors import BundleError, InduceKVError, TaskDataError

from ..backbone.injection import Memory
from ..backbone.scoring import Questions, batch_rows
from ..runtime.checkpoint import Checkpoint
from ..runtime.progress import progress_bar
from ..update.inputs import TaskInputs
from .duration import announce
from .entries import new_task
from .lr_search import (
    LEARNING_RATES,
    Trial,
    own_entries,
    progress_text,
    require_storable,
    search_learning_rate,
    validation_loss,
)
from .settings import RefinedSettings
from .training import StepRecord, train
from .training_problem import TrainingProblem

DECOUPLED_RATES: Final = (0.1, 0.3)
CHECKED: Final = 64  # validation questions, at most, that a check asks


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
    problems = _problems(prepare, settings)
    most = len(problems) * _rates_each(settings)
    announce([problem for _, problem, _ in problems], settings, _rates_each(settings), progress)
    begun = 0
    for activation, problem, validation in problems:
        for rates in _rates_to_try(settings, candidates):
            if _is_perfect(candidates) and settings.patience is not None:
                break  # no other rate can be better
            begun += 1
            title = f"Training {begun} of {'at most ' if most > 1 else ''}{most}, {activation}"
            try:
                candidates.append(
                    _trained(activation, problem, validation, settings, rates, checkpoint, title if progress else None)
                )
            except (TaskDataError, BundleError) as error:
                failure = error
        if _is_perfect(candidates):
            break  # none is better, and this is the latest
    if failure is not None and not candidates:
        raise failure
    return sorted(candidates, key=lambda candidate: ACTIVATIONS.index(candidate.activation))


Problem = tuple[Activation, TrainingProblem, Questions]


def _problems(
    prepare: Callable[[Activation], tuple[TrainingProblem, Questions]], settings: RefinedSettings
) -> list[Problem]:
    """What is trained with each activation, the latest first; "text" and "prompt" are the same without pictures."""
    problems: list[Problem] = []
    tried: list[list[list[int] | None]] = []
    for activation in reversed(activations_to_try(settings)):
        problem, validation = prepare(activation)
        positions = [_positions(each) for each in (problem.current.questions, validation)]
        if positions not in tried:
            tried.append(positions)
            problems.append((activation, problem, validation))
    return problems


def _trained(
    activation: Activation,
    problem: TrainingProblem,
    validation: Questions,
    settings: RefinedSettings,
    rates: Sequence[float],
    checkpoint: Checkpoint,
    title: str | None,
) -> Candidate:
    """The training with the best of `rates`; `title` is that of its progress, None to show none. Collective.

    Raises:
        TaskDataError, BundleError: it diverges.
    """
    trials = search_learning_rate(problem, settings, rates, validation, checkpoint, title is not None)
    training = min(trials, key=_loss).training
    rate = training.learning_rate
    checked = _checked(validation, settings)
    measure = (lambda memory: validation_loss(problem, checked, memory)) if settings.patience and len(checked) else None
    with progress_bar(f"{title}, rate {rate:g}", settings.steps, title is not None) as advance:
        train(
            training,
            checkpoint,
            f"refinement-{activation}-{rate}",
            after_step=lambda t: advance(t.step, progress_text(t)),
            validation_loss=measure,
        )
    memory = training.memory()
    require_storable(memory)
    accuracy = loss = None
    if settings.activation == "search" or (settings.form == "decoupled" and settings.learning_rate is None):
        accuracy = problem.scorer.accuracy(validation, memory, own_entries(problem))
        loss = validation_loss(problem, validation, memory)
    tried_in_part = tuple((trial.learning_rate, trial.validation_nll) for trial in trials if len(trials) > 1)
    return Candidate(activation, rate, memory, tuple(training.history), accuracy, loss, tried_in_part)


def _checked(validation: Questions, settings: RefinedSettings) -> Questions:
    rows = batch_rows(len(validation), CHECKED, settings.seed, (7,))
    first_active = None if validation.first_active is None else validation.first_active[rows]
    return Questions([validation.examples[row] for row in rows], validation.keys[rows], first_active)


def _is_perfect(candidates: Sequence[Candidate]) -> bool:
    return bool(candidates) and min(candidates, key=_loss).accuracy == 1


def _rates_each(settings: RefinedSettings) -> int:
    """How many trainings an activation has at most."""
    return len(DECOUPLED_RATES) if settings.learning_rate is None and settings.form == "decoupled" else 1


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
