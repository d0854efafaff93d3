"""Fit a relevance gate to questions of C tasks and to everything else.

A gate of prototypes (`training`) looks for a token that is like a task's; one of two classifiers (`classifiers`) weighs
a question's text, all of it and in parts. Classifiers tell more of people's own words apart; of questions in one form
with places to fill they learn the form alone.

Shapes: C tasks, n questions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from inducekv_vllm.backbone.checkpoints import Kind as ModelKind
from inducekv_vllm.backbone.turns import turn_marks
from inducekv_vllm.bundle import Gate
from inducekv_vllm.errors import ConfigError, TaskDataError
from inducekv_vllm.gate import TurnMarks

from ..backbone.model import Backbone
from ..backbone.token_values import asked_texts, clause_ends_of, layers_of_gate, token_values
from ..data.examples import Example
from .background import everyday_requests
from .classified import LooksAt, classified_gate
from .classifiers import Seen
from .encoding import encode_questions
from .fitting_set import GateQuestion, fitting_set
from .settings import DEFAULT_MISSES, Kind
from .training import Price, train_gate
from .variations import text_of
from .wording import in_one_form

FEWEST: Final = 8  # examples of a task that classifiers are fitted to, unless they are asked for


@dataclass(frozen=True)
class FittedGate:
    """A gate, and what other shares of missed questions would cost."""

    gate: Gate  # as a bundle stores it
    prices: tuple[Price, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)  # of a whole fit, by what it took them for
    misses: float = 0.0  # the share of own questions that it may miss
    warnings: tuple[str, ...] = ()  # why the gate may not be of use

    def recorded(
        self, base: Sequence[Example], background: Sequence[Example], near_misses: Sequence[Example]
    ) -> dict[str, Any]:
        """What a bundle's settings have of the fit, and of what the gate is to stay closed for."""
        counts = {"base_questions": len(base), "background_requests": len(background)}
        return {"gate_misses": self.misses, **counts} | ({"near_misses": len(near_misses)} if near_misses else {})


def fit_gate(
    backbone: Backbone,
    own: Mapping[str, Sequence[Example]],
    base: Sequence[Example],
    *,
    background: Sequence[Example] = (),
    near_misses: Sequence[Example] = (),
    misses: float | None = None,
    seed: int = 0,
    kind: Kind | None = None,
    layers: tuple[int, ...] | None = None,
    progress: bool = False,
) -> FittedGate:
    """A gate that tells the questions of C tasks from each other and from everything else; answers are not used.

    Args:
        own: examples of each task, in the order of the stream.
        base: questions that need no memory.
        background: other requests that need no memory, besides those of the package.
        near_misses: requests that look like those of a task and are not.
        misses: share of the tasks' questions that the gate may miss, of those that it was not fitted to; None for the
            default of the gate's kind.
        kind: of the gate (default: see `suitable_kind`).
        layers: whose values it looks at, ascending; None for those of `layers_of_gate`. A request of a gate that looks
            at later ones waits longer for its decision, and less memory can join its pass.

    Raises:
        ConfigError: classifiers for a model that takes pictures; a task without questions, with everyday requests as
            questions, or with the same ones as another; background requests or near-misses that are a task's.
        TaskDataError: the model's processor refuses a question.
    """
    check_questions(own, background, near_misses=near_misses)
    by_classifiers = (kind or suitable_kind(backbone.kind, own)) == "classifiers"
    if by_classifiers and backbone.kind != "text":
        raise ConfigError("a gate of classifiers is for models that take text alone, and this one takes pictures")
    tasks, allowed = tuple(own), DEFAULT_MISSES if misses is None else misses
    questions, labels = labelled_questions(
        backbone,
        own,
        base,
        background=background,
        near_misses=near_misses,
        by_classifiers=by_classifiers,
        seed=seed,
    )
    marks, layers = turn_marks(backbone.processor), layers or layers_of_gate(backbone.num_layers, backbone.full_layers)
    warnings: tuple[str, ...] = ()
    began = time.monotonic()
    if by_classifiers:
        clause_ends = clause_ends_of(backbone)
        seen_by_them = seen(backbone, questions, layers, clause_ends, progress=progress)
        looked = time.monotonic()
        gate, prices, warnings, allowed = classified_gate(
            seen_by_them, questions, torch.tensor(labels), tasks, LooksAt(layers, marks, clause_ends), misses
        )
        warnings += tuple(
            f"the questions of {task!r} are one form with places to fill: classifiers close for any other wording"
            for task in tasks_in_one_form(own)
        )
    else:
        encoded = encode_questions(backbone, questions)
        values = token_values(backbone, encoded, layers, marks, dtype=torch.float16, progress=progress)
        looked = time.monotonic()
        gate, prices = _prototype_gate(values, questions, labels, tasks, layers, marks, allowed, seed)
    seconds = {"features": looked - began, "training": time.monotonic() - looked}
    return FittedGate(gate, prices, seconds, allowed, warnings)


def labelled_questions(
    backbone: Backbone,
    own: Mapping[str, Sequence[Example]],
    base: Sequence[Example],
    *,
    background: Sequence[Example],
    near_misses: Sequence[Example],
    by_classifiers: bool,
    seed: int,
) -> tuple[list[GateQuestion], list[int]]:
    """What a gate of this kind is fitted to: n questions, and the number of each one's task; C for none."""
    questions = fitting_set(
        own,
        base,
        background=background,
        near_misses=near_misses,
        pictures=backbone.kind != "text",
        for_classifiers=by_classifiers,
        seed=seed,
    )
    tasks = tuple(own)
    return questions, [len(tasks) if q.task is None else tasks.index(q.task) for q in questions]


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


def _prototype_gate(
    values: Sequence[Tensor],
    questions: Sequence[GateQuestion],
    labels: Sequence[int],
    tasks: tuple[str, ...],
    layers: tuple[int, ...],
    marks: TurnMarks,
    misses: float,
    seed: int,
) -> tuple[Gate, tuple[Price, ...]]:
    """The gate and its prices, from what `token_values` gives for the questions."""
    trained = train_gate(
        values,
        labels=labels,
        held_out=[q.part == "held_out" for q in questions],
        kinds=[q.kind for q in questions],
        num_tasks=len(tasks),
        misses=misses,
        seed=seed,
    )
    gate = Gate(
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
    return gate, trained.prices


def check_questions(
    own: Mapping[str, Sequence[Example]],
    background: Sequence[Example] = (),
    base: Sequence[Example] = (),
    *,
    near_misses: Sequence[Example] = (),
) -> None:
    """Refuse what no gate can tell from each other.

    Raises:
        ConfigError: two tasks have the same questions, a task has one question several times, everyday requests are
            those of a task, or background requests or near-misses.
        TaskDataError: base questions are those of a task.
    """
    task_of = {example.source_digest: task for task, examples in own.items() for example in examples}
    for example in base:
        if (task := task_of.get(example.source_digest)) is not None:
            raise TaskDataError(f"base question {example.id!r} is also a question of the task {task!r}")
    for example in background:
        if (task := task_of.get(example.source_digest)) is not None:
            raise ConfigError(f"background request {example.id!r} is also a question of the task {task!r}")
    said = {_said(example): task for task, examples in own.items() for example in examples if not example.images}
    for example in near_misses:
        if (task := task_of.get(example.source_digest, said.get(_said(example)))) is not None:
            raise ConfigError(f"near-miss {text_of(example.messages)!r} (--not) is a question of the task {task!r}")
    everyday = {request.text.casefold() for request in everyday_requests()}
    seen: dict[str, set[str]] = {}
    for task, examples in own.items():
        if not examples:
            raise ConfigError(f"the gate needs questions of the task {task!r}, and there are none")
        digests = {example.source_digest for example in examples}
        if len(examples) > 1 and len(digests) == 1:
            raise ConfigError(
                f"the task {task!r} has one question {len(examples)} times: the gate needs questions in other words"
            )
        common = [e for e in examples if text_of(e.messages).casefold() in everyday and not e.images]
        if len(common) > len(examples) / 2:
            raise ConfigError(
                f"{len(common)} of the {len(examples)} questions of the task {task!r} are everyday requests, such as "
                f"{text_of(common[0].messages)!r}: the gate stays closed for those"
            )
        for earlier, theirs in seen.items():
            if len(shared := digests & theirs) > min(len(digests), len(theirs)) / 2:
                raise ConfigError(
                    f"the tasks {earlier!r} and {task!r} have {len(shared)} questions in common: no gate can tell them"
                )
        seen[task] = digests


def _said(example: Example) -> str:
    return " ".join(text_of(example.messages).casefold().split())
