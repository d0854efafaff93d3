"""The trainings of a new task, of which one is kept: by activation and learning rate.

Memory that acts later costs less to serve, because the prompt before it is the untouched model's, and some tasks are
better off with it; so the latest activation is kept that is not clearly worse than the best. Latest of all is memory
that acts on the generation, and only in the layers from the gate's last one on: it costs a request no second pass
(`inducekv_vllm.workers.same_pass`).

Tasks that combine what the model knows want a lower learning rate than tasks with new pictures: the latest activation,
whose training is the cheapest, is trained with each rate, and each earlier one with that of the best training so far.
In deep models that may be too high: an activation that ends worse than a later one is trained with the next lower rate
too.

With a patience, a training that answers every validation question right is the last one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from inducekv_vllm.bundle.activation import ACTIVATIONS, Activation
from inducekv_vllm.errors import BundleError, InduceKVError, TaskDataError

from ..backbone.injection import Memory
from ..backbone.scoring import Questions, Scorer
from ..runtime.checkpoint import Checkpoint
from ..runtime.progress import progress_bar
from .duration import announce
from .settings import RefinedSettings
from .training import StepRecord, Training, TrainingProblem, train

LEARNING_RATES: Final = (0.1, 0.3)


@dataclass(frozen=True)
class Candidate:
    """A finished training."""

    activation: Activation
    first_layer: int  # the entries do nothing in the layers before it
    learning_rate: float
    memory: Memory  # the task's entries
    history: tuple[StepRecord, ...]
    accuracy: float | None  # on the validation examples; None if there was one training alone
    validation_nll: float | None  # likewise

    @property
    def lateness(self) -> tuple[int, int]:
        """Larger for memory that acts later."""
        return ACTIVATIONS.index(self.activation), self.first_layer


def train_candidates(
    problem: TrainingProblem, settings: RefinedSettings, gate_layer: int, checkpoint: Checkpoint, progress: bool
) -> list[Candidate]:
    """Train with every activation and learning rate to try; those that diverge are left out.

    Args:
        gate_layer: the last one that the gate looks at.

    Raises:
        TaskDataError, BundleError: all of them diverge.
    """
    candidates: list[Candidate] = []
    failure: InduceKVError | None = None
    problems = _latest_first(problem, settings, gate_layer)
    rates_each = len(LEARNING_RATES) if settings.learning_rate is None else 1
    announce([each for _, each in problems], settings, rates_each, progress)
    begun, most = 0, len(problems) * rates_each
    for activation, each in problems:
        for rate in _rates_to_try(settings, candidates):
            if settings.patience is not None and _is_perfect(candidates):
                break  # no other rate can be better
            begun += 1
            where = f"{activation} from layer {each.first_layer}" if each.first_layer else activation
            title = f"Training {begun} of {'at most ' if most > 1 else ''}{most}, {where}, rate {rate:g}"
            try:
                candidates.append(_trained(activation, each, settings, rate, checkpoint, title if progress else None))
            except (TaskDataError, BundleError) as error:
                failure = error
        if _is_perfect(candidates):
            break  # none is better, and this is the latest
    if failure is not None and not candidates:
        raise failure
    return sorted(candidates, key=lambda candidate: candidate.lateness)


def latest_good(candidates: Sequence[Candidate], num_questions: int) -> Candidate:
    """The best of the latest activation whose accuracy is within one standard error of the best of all.

    The standard error of a share p of n answers is sqrt(p (1 - p) / n). An activation's best is that of the least loss.

    Args:
        candidates: those that act later behind the others.
    """
    by_lateness: dict[tuple[int, int], Candidate] = {}
    for candidate in candidates:
        best = by_lateness.setdefault(candidate.lateness, candidate)
        if _loss(candidate) < _loss(best):
            by_lateness[candidate.lateness] = candidate
    highest = max(candidate.accuracy or 0.0 for candidate in by_lateness.values())
    least = highest - math.sqrt(highest * (1 - highest) / num_questions) if num_questions else 0.0
    return [c for c in by_lateness.values() if (c.accuracy or 0.0) >= least][-1]


def _latest_first(
    problem: TrainingProblem, settings: RefinedSettings, gate_layer: int
) -> list[tuple[Activation, TrainingProblem]]:
    """What is trained with each activation; "text" and "prompt" are the same without pictures."""
    if settings.form == "merged":
        return [("prompt", problem)]
    tried: list[tuple[Activation, TrainingProblem]] = []
    positions: list[list[list[int]]] = []
    for activation in reversed(ACTIVATIONS) if settings.activation == "search" else (settings.activation,):
        questions = [active_from(problem.scorer, each, activation) for each in (problem.training, problem.validation)]
        starts = [each.first_active.tolist() for each in questions if each.first_active is not None]
        if starts not in positions:
            positions.append(starts)
            each = replace(problem, training=questions[0], validation=questions[1])
            if activation == "generation" and settings.activation == "search":
                tried.append((activation, replace(each, first_layer=gate_layer)))
            tried.append((activation, each))
    return tried


def active_from(scorer: Scorer, questions: Questions, activation: Activation) -> Questions:
    """The questions, with memory that acts on them from where the activation says."""
    first = scorer.first_active(questions.examples, [activation] * len(questions))
    return replace(questions, first_active=first)


def _rates_to_try(settings: RefinedSettings, candidates: Sequence[Candidate]) -> Iterator[float]:
    """The learning rates of an activation's trainings.

    Args:
        candidates: so far; it grows while the trainings are made.
    """
    if settings.learning_rate is not None:
        yield settings.learning_rate
    elif not candidates:
        yield from LEARNING_RATES
    else:
        best = min(candidates, key=_loss)
        for rate in sorted((rate for rate in LEARNING_RATES if rate <= best.learning_rate), reverse=True):
            yield rate
            if min(candidates, key=_loss) is not best:
                return


def _trained(
    activation: Activation,
    problem: TrainingProblem,
    settings: RefinedSettings,
    rate: float,
    checkpoint: Checkpoint,
    title: str | None,
) -> Candidate:
    """One training; `title` is that of its progress, None to show none.

    Raises:
        TaskDataError, BundleError: it diverges.
    """
    training = Training(problem, settings, rate)
    with progress_bar(title or "", settings.steps, title is not None) as advance:
        memory = train(
            training,
            checkpoint,
            f"refinement-{activation}-{problem.first_layer}-{rate}",
            lambda training: advance(training.step, progress_text(training)),
        )
    accuracy = loss = None
    if settings.activation == "search" or settings.learning_rate is None:
        accuracy = problem.scorer.accuracy(problem.validation, memory)
        loss = problem.scorer.mean_loss(problem.validation, memory)
    return Candidate(activation, problem.first_layer, rate, memory, tuple(training.history), accuracy, loss)


def progress_text(training: Training) -> str:
    checked = f", {training.checks[-1]:.3f} on validation" if training.checks else ""
    return f"NLL {training.history[-1].current:.3f}{checked}" if training.history else ""


def _is_perfect(candidates: Sequence[Candidate]) -> bool:
    return bool(candidates) and min(candidates, key=_loss).accuracy == 1


def _loss(candidate: Candidate) -> float:
    return math.inf if candidate.validation_nll is None else candidate.validation_nll
