"""Fit a relevance gate to questions of C tasks and to everything else.

A gate of prototypes (`training`) looks for a token that is like a task's; one of two classifiers (`classifiers`) weighs
a question's text, all of it and in parts. Classifiers tell more of people's own words apart; of questions in one form
with places to fill they learn the form alone.

Shapes: C tasks, n questions.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from inducekv_vllm.backbone.checkpoints import Kind as ModelKind
from inducekv_vllm.backbone.turns import turn_marks
from inducekv_vllm.bundle import Gate
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.gate import TurnMarks

from ..backbone.model import Backbone
from ..backbone.token_values import asked_texts, clause_ends_of, layers_of_gate, token_values
from ..data.examples import Example
from .classified import LooksAt, classified_gate
from .classifiers import Seen
from .data import GateData, check_questions
from .encoding import encode_questions
from .fitting_set import GateQuestion, fitting_set
from .settings import DEFAULT_MISSES, GateOptions, Kind
from .training import Price, TrainedGate, train_gate
from .variations import text_of
from .wording import in_one_form

USUAL: Final = GateOptions()
FEWEST: Final = 8  # examples of a task that classifiers are fitted to, unless they are asked for


@dataclass(frozen=True)
class FittedGate:
    """A gate, and what other shares of missed questions would cost."""

    gate: Gate  # as a bundle stores it
    prices: tuple[Price, ...]
    misses: float  # the share of own questions that it may miss
    recorded: Mapping[str, Any]  # what a bundle's settings have of the fit
    seconds: Mapping[str, float]  # by what it took them for
    warnings: tuple[str, ...] = ()  # why the gate may not be of use


def fit_gate(backbone: Backbone, data: GateData, options: GateOptions = USUAL, *, progress: bool = False) -> FittedGate:
    """A gate that tells the questions of C tasks from each other and from everything else.

    Raises:
        ConfigError, TaskDataError: see `check_questions`; classifiers for a model that takes pictures, or the model's
            processor refuses a question.
    """
    check_questions(data)
    by_classifiers = (options.kind or suitable_kind(backbone.kind, data.own)) == "classifiers"
    if by_classifiers and backbone.kind != "text":
        raise ConfigError("a gate of classifiers is for models that take text alone, and this one takes pictures")
    tasks, misses = tuple(data.own), DEFAULT_MISSES if options.misses is None else options.misses
    questions = fitting_set(data, pictures=backbone.kind != "text", for_classifiers=by_classifiers, seed=options.seed)
    labels = [len(tasks) if q.task is None else tasks.index(q.task) for q in questions]
    marks, layers = turn_marks(backbone.processor), options.layers or layers_of_gate(backbone)
    warnings: tuple[str, ...] = ()
    began = time.monotonic()
    if by_classifiers:
        clause_ends = clause_ends_of(backbone)
        with reading(backbone, options):
            seen_by_them = seen(backbone, questions, layers, clause_ends, progress=progress)
        looked = time.monotonic()
        gate, prices, warnings, misses = classified_gate(
            seen_by_them, questions, torch.tensor(labels), tasks, LooksAt(layers, marks, clause_ends), options.misses
        )
        warnings += tuple(
            f"the questions of {task!r} are one form with places to fill: classifiers close for any other wording"
            for task in tasks_in_one_form(data.own)
        )
    else:
        encoded = encode_questions(backbone, questions)
        with reading(backbone, options):
            values = token_values(backbone, encoded, layers, marks, dtype=torch.float16, progress=progress)
        looked = time.monotonic()
        trained = train_gate(
            values,
            labels=labels,
            held_out=[q.part == "held_out" for q in questions],
            kinds=[q.kind for q in questions],
            num_tasks=len(tasks),
            misses=misses,
            seed=options.seed,
        )
        gate, prices = _of_prototypes(trained, tasks, layers, marks), trained.prices
    seconds = {"features": looked - began, "training": time.monotonic() - looked}
    return FittedGate(gate, prices, misses, {"gate_misses": misses, **data.counts}, seconds, warnings)


def reading(backbone: Backbone, options: GateOptions) -> torch.autocast:
    """The precision in which the model reads questions."""
    return torch.autocast(backbone.device.type, torch.bfloat16, enabled=options.in_bfloat16)


def suitable_kind(model: ModelKind, own: Mapping[str, Sequence[Example]]) -> Kind:
    """Classifiers for people's own words, if there are enough and the model takes text alone.

    They would learn a form by heart.
    """
    few = any(len(examples) < FEWEST for examples in own.values())
    return "prototypes" if model != "text" or few or any(tasks_in_one_form(own)) else "classifiers"


def tasks_in_one_form(own: Mapping[str, Sequence[Example]]) -> Iterator[str]:
    for task, examples in own.items():
        if in_one_form([text_of(example.messages) for example in examples]):
            yield task


def seen(
    backbone: Backbone,
    questions: Sequence[GateQuestion],
    layers: tuple[int, ...],
    clause_ends: Tensor,
    *,
    progress: bool = False,
) -> Seen:
    """What classifiers see of n questions; one without text has the mean of those with some."""
    encoded = encode_questions(backbone, questions)
    marks, ends = turn_marks(backbone.processor), frozenset(clause_ends.tolist())
    asked = asked_texts(backbone, encoded, layers, marks, ends, progress=progress)
    usual: Tensor = torch.stack([means[0] for means in asked.means if means is not None]).mean(dim=0)
    return Seen.of([usual[None] if means is None else means for means in asked.means], asked.texts)


def _of_prototypes(trained: TrainedGate, tasks: tuple[str, ...], layers: tuple[int, ...], marks: TurnMarks) -> Gate:
    return Gate(
        layers=layers,
        marks=marks,
        center=trained.center,
        scale=trained.scale,
        prototypes=trained.prototypes.half(),
        floors=trained.floors,
        weights=trained.weights,
        thresholds=trained.thresholds,
        near=trained.near,
        tasks=tasks,
    )
