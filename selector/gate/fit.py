"""Fit a relevance gate to questions of C tasks and to everything else.

Shapes: C tasks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from inducekv_vllm.backbone.turns import turn_marks
from inducekv_vllm.bundle import Gate
from inducekv_vllm.errors import ConfigError, TaskDataError

from ..backbone.model import Backbone
from ..backbone.token_values import layers_of_gate, token_values
from ..data.examples import Example
from .background import everyday_requests
from .encoding import encode_questions
from .fitting_set import fitting_set
from .settings import DEFAULT_MISSES
from .training import Price, train_gate
from .variations import text_of


@dataclass(frozen=True)
class FittedGate:
    """A gate, and what other shares of missed questions would cost."""

    gate: Gate  # as a bundle stores it
    prices: tuple[Price, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)  # of a whole fit, by what it took them for


def fit_gate(
    backbone: Backbone,
    own: Mapping[str, Sequence[Example]],
    base: Sequence[Example],
    *,
    background: Sequence[Example] = (),
    misses: float = DEFAULT_MISSES,
    seed: int = 0,
) -> FittedGate:
    """A gate that tells the questions of C tasks from each other and from everything else; answers are not used.

    Args:
        own: examples of each task, in the order of the stream.
        base: questions that need no memory.
        background: other requests that need no memory, besides those of the package.
        misses: share of the tasks' held-out questions that the gate may miss.

    Raises:
        ConfigError: a task without questions, with everyday requests as questions, or two tasks with the same ones.
        TaskDataError: the model's processor refuses a question.
    """
    check_questions(own, background)
    questions = fitting_set(own, base, background=background, pictures=backbone.kind != "text", seed=seed)
    marks, layers = turn_marks(backbone.processor), layers_of_gate(backbone.num_layers, backbone.full_layers)
    tasks = tuple(own)
    began = time.monotonic()
    values = token_values(backbone, encode_questions(backbone, questions), layers, marks, dtype=torch.float16)
    seen = time.monotonic()
    trained = train_gate(
        values,
        labels=[len(tasks) if q.task is None else tasks.index(q.task) for q in questions],
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
    return FittedGate(gate, trained.prices, {"features": seen - began, "training": time.monotonic() - seen})


def check_questions(
    own: Mapping[str, Sequence[Example]], background: Sequence[Example] = (), base: Sequence[Example] = ()
) -> None:
    """Refuse what no gate can tell from each other.

    Raises:
        ConfigError: two tasks have the same questions, everyday requests are those of a task, or background requests.
        TaskDataError: base questions are those of a task.
    """
    task_of = {example.source_digest: task for task, examples in own.items() for example in examples}
    for example in base:
        if (task := task_of.get(example.source_digest)) is not None:
            raise TaskDataError(f"base question {example.id!r} is also a question of the task {task!r}")
    everyday = {request.text.casefold() for request in everyday_requests()}
    known = {example.source_digest: example for example in background}
    seen: dict[str, set[str]] = {}
    for task, examples in own.items():
        if not examples:
            raise ConfigError(f"the gate needs questions of the task {task!r}, and there are none")
        common = [e for e in examples if text_of(e.messages).casefold() in everyday and not e.images]
        if len(common) > len(examples) / 2:
            raise ConfigError(
                f"{len(common)} of the {len(examples)} questions of the task {task!r} are everyday requests, such as "
                f"{text_of(common[0].messages)!r}: the gate stays closed for those"
            )
        for example in examples:
            if example.source_digest in known:
                other = known[example.source_digest]
                raise ConfigError(f"background request {other.id!r} is also a question of the task {task!r}")
        digests = {example.source_digest for example in examples}
        for earlier, theirs in seen.items():
            if len(shared := digests & theirs) > min(len(digests), len(theirs)) / 2:
                raise ConfigError(
                    f"the tasks {earlier!r} and {task!r} have {len(shared)} questions in common: no gate can tell them"
                )
        seen[task] = digests
