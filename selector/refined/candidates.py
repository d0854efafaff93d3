"""The trainings of a new task, by activation and learning rate: all are begun, and one is finished.

Memory that acts later costs less to serve, because the prompt before it is the untouched model's, and some tasks are
better off with it. Latest of all is memory that acts on the generation, and only in the layers from the gate's last one
on: it costs a request no second pass (`inducekv_vllm.workers.decisions`). Tasks that combine what the model knows want
a lower learning rate than tasks with new pictures.

What a task wants of a small model shows early, so the search is successive halving [https://arxiv.org/abs/1502.07943].
With a wide one, there are fewer trainings, and all go to the end. Of trainings that are equally good on validation, the
one whose memory acts latest goes on; on a hybrid a little worse is good enough.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from inducekv_vllm.backbone.memory_layers import WIDE
from inducekv_vllm.bundle.activation import ACTIVATIONS, Activation
from inducekv_vllm.errors import BundleError, InduceKVError, TaskDataError

from ..backbone.injection import TensorMemory
from ..backbone.model import Backbone
from ..backbone.scoring import Questions, Scorer
from ..runtime.progress import progress_bar
from ..runtime.running import ALONE, Run
from .duration import announce
from .preconditioner import Preconditioner
from .settings import RefinedSettings
from .training import StepRecord, Training, TrainingProblem, train

LEARNING_RATES: Final = (0.1, 0.3)
RATES_IF_WIDE: Final = (0.1,)
RATES_OF_PROMPTS_IF_WIDE: Final = (0.02,)  # memory on a prompt's tokens diverges with more
# Standard errors within which two losses are as good. A hybrid's state cannot go back: a second pass is one over all of
# a prompt, or over what follows its last cached state.
AS_GOOD: Final = 1.0
AS_GOOD_ON_A_HYBRID: Final = 2.0
RUNGS: Final = ((1 / 16, 2), (1 / 4, 1))  # after this share of the steps, so many trainings go on
RUNGS_IF_WIDE: Final = ((1, 1),)  # memory on the prompt is behind until its rate has decayed


@dataclass(frozen=True)
class Candidate:
    """A training that was begun."""

    activation: Activation
    training: Training
    # [validation questions]: NLL when it was compared last; [0] if it never was.
    losses: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def first_layer(self) -> int:
        """The entries do nothing in the layers before it."""
        return self.training.problem.first_layer

    @property
    def lateness(self) -> tuple[int, int]:
        """Larger for memory that acts later."""
        return ACTIVATIONS.index(self.activation), self.first_layer

    @property
    def mean_loss(self) -> float:
        return float(self.losses.mean()) if len(self.losses) else math.inf

    @property
    def name(self) -> str:
        problem, rate = self.training.problem, self.training.learning_rate
        coordinates = "-preconditioned" if problem.preconditioner else ""
        layers = "" if problem.memory.layers is None else f"-in-{len(problem.memory.layers)}-layers"
        return f"refinement-{self.activation}-{self.first_layer}-{rate}{coordinates}{layers}"

    @property
    def title(self) -> str:
        layers = f" from layer {self.first_layer}" if self.first_layer else ""
        return f"{self.activation}{layers}, rate {self.training.learning_rate:g}"


@dataclass(frozen=True)
class Search:
    """The training that was finished, and all that were begun and did not diverge."""

    activation: Activation
    first_layer: int
    learning_rate: float
    memory: TensorMemory  # the task's entries
    history: tuple[StepRecord, ...]
    begun: tuple[Candidate, ...]


def search(
    problem: TrainingProblem,
    settings: RefinedSettings,
    gate_layer: int,
    run: Run,
) -> Search:
    """Begin with every activation and learning rate, and finish the best; a training that diverges is left out.

    Args:
        gate_layer: the last one that the gate looks at.

    Raises:
        TaskDataError, BundleError: all of them diverge.
    """
    return best_of(every_candidate(problem, settings, gate_layer), run)


def best_of(begun: Sequence[Candidate], run: Run = ALONE) -> Search:
    """Begin with all of them, and finish the best. Raises as `search` does."""
    ranking = list(begun)  # the best first, once they are compared
    problem, settings = ranking[0].training.problem, ranking[0].training.settings
    rungs = rungs_for(problem.scorer.backbone)
    announce([candidate.training for candidate in ranking], rungs, run.progress)
    diverged: list[InduceKVError] = []
    running, within = len(ranking), AS_GOOD_ON_A_HYBRID if problem.scorer.backbone.has_states else AS_GOOD
    for share, kept in rungs:
        if running > kept:
            step, compared = math.ceil(share * settings.steps), list[Candidate]()
            for candidate in ranking[:running]:
                with _noted(diverged):
                    _train(candidate, step, run)
                    losses = candidate.training.compare(step, run.checkpoint, candidate.name)
                    compared.append(replace(candidate, losses=losses))
            order = best_first([each.losses for each in compared], [each.lateness for each in compared], within)
            ranking, running = [compared[row] for row in order] + ranking[running:], kept
    for candidate in ranking:
        with _noted(diverged):
            return Search(
                activation=candidate.activation,
                first_layer=candidate.first_layer,
                learning_rate=candidate.training.learning_rate,
                memory=_train(candidate, settings.steps, run),
                history=tuple(candidate.training.history),
                begun=tuple(ranking),
            )
    raise diverged[-1]


@contextmanager
def _noted(diverged: list[InduceKVError]) -> Iterator[None]:
    try:
        yield
    except (TaskDataError, BundleError) as error:
        diverged.append(error)


def best_first(losses: Sequence[Tensor], lateness: Sequence[tuple[int, int]], within: float = AS_GOOD) -> list[int]:
    """The rows of trainings by mean loss, but those that are as good as the best come first, the latest of them ahead.

    As good: the mean of the differences to the best, over the questions, is within so many of its standard errors.

    Args:
        losses: [validation questions] of each.
        lateness: larger for memory that acts later.
    """
    means = [float(each.mean()) for each in losses]
    rows = range(len(losses))
    best = min(rows, key=lambda row: means[row], default=0)

    def place(row: int) -> tuple[bool, tuple[int, ...], float]:
        worse = losses[row] - losses[best]  # [validation questions]
        error = float(worse.std()) / math.sqrt(len(worse)) if len(worse) > 1 else 0.0
        as_good = means[row] - means[best] <= within * error
        return not as_good, tuple(-each for each in lateness[row]) if as_good else (), means[row]

    return sorted(rows, key=place)


def every_candidate(problem: TrainingProblem, settings: RefinedSettings, gate_layer: int) -> list[Candidate]:
    problem = preconditioned(problem, settings)
    given = () if settings.learning_rate is None else (settings.learning_rate,)
    return [
        Candidate(activation, Training(each, settings, rate))
        for activation, each in _latest_first(problem, settings, gate_layer)
        for rate in given or rates_for(problem.scorer.backbone, activation)
    ]


def preconditioned(problem: TrainingProblem, settings: RefinedSettings) -> TrainingProblem:
    """The problem as wide models' decoupled memory is trained; others stay as they are."""
    if _is_wide(problem.scorer.backbone) and settings.form == "decoupled":
        return replace(problem, preconditioner=Preconditioner.of(problem.scorer.backbone, problem.memory.layers))
    return problem


def rates_for(backbone: Backbone, activation: Activation) -> tuple[float, ...]:
    if not _is_wide(backbone):
        return LEARNING_RATES
    return RATES_IF_WIDE if activation == "generation" else RATES_OF_PROMPTS_IF_WIDE


def rungs_for(backbone: Backbone) -> tuple[tuple[float, int], ...]:
    """After which share of the steps how many trainings go on."""
    return RUNGS_IF_WIDE if _is_wide(backbone) else RUNGS


def _is_wide(backbone: Backbone) -> bool:
    return backbone.hidden_size >= WIDE


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
            layers = (0,) if activation != "generation" else _of_generation(problem, settings, gate_layer)
            tried += [(activation, replace(each, first_layer=layer)) for layer in layers]
    return tried


def _of_generation(problem: TrainingProblem, settings: RefinedSettings, gate_layer: int) -> tuple[int, ...]:
    """The layers that memory on the generation is tried from."""
    # 80 tickets: from the gate's layer on, Qwen2.5-0.5B has 23 of 24 right and not 22, SmolLM2 20 and not 23. Of four
    # other tasks, Qwen was best on none with memory of the generation in all layers.
    if _is_wide(problem.scorer.backbone):
        return (gate_layer,)
    return (gate_layer, 0) if settings.activation == "search" else (0,)


def active_from(scorer: Scorer, questions: Questions, activation: Activation) -> Questions:
    """The questions, with memory that acts on them from where the activation says."""
    first = scorer.first_active(questions.examples, [activation] * len(questions))
    return replace(questions, first_active=first)


def _train(candidate: Candidate, step: int, run: Run) -> TensorMemory:
    """Up to that step. Raises TaskDataError, BundleError: it diverges."""
    return train_told(candidate.training, candidate.name, candidate.title, step, run)


def train_told(training: Training, name: str, title: str, step: int, run: Run) -> TensorMemory:
    """`train` up to that step; progress and callbacks are told of it by `title`. Raises as `train` does."""
    with progress_bar(f"Training, {title}, to step {step}", step, run.progress) as advance:

        def after_step(training: Training) -> None:
            advance(training.step, progress_text(training))
            for callback in run.callbacks:
                callback.on_step(title, training.step, training.history[-1].current)
                if training.checked_at == training.step:
                    callback.on_check(title, training.step, training.checks[-1])

        return train(training, run.checkpoint, name, after_step, until=step)


def progress_text(training: Training) -> str:
    checked = f", {training.checks[-1]:.3f} on validation" if training.checks else ""
    return f"NLL {training.history[-1].current:.3f}{checked}" if training.history else ""
