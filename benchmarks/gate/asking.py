"""Asks gates the questions of the protocol, in transformers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from benchmarks.continual.suites import Suite
from benchmarks.gate.protocol import other_questions, own_questions
from benchmarks.gate.styles import STYLES
from inducekv_vllm.bundle import Gate
from inducekv_vllm.gate import Closed
from selector.backbone.model import Backbone
from selector.backbone.token_values import evidence_in, token_values
from selector.gate.encoding import encode_questions
from selector.gate.fitting_set import GateQuestion

AT_ONCE: Final = 256  # questions whose token values are held
NEAR_MISSES: Final = {"demo": "demo", "demo-search": "demo", "real-text": "text", "real-pictures": "pictures"}


@dataclass(frozen=True)
class Asked:
    """What one gate decided on one question."""

    kind: str
    task: str | None  # the question's own; None: of no task
    routed: str | None  # the task that it was sent to
    closed: Closed | None = None  # why it was sent to none


def protocol_questions(suite: Suite, tests: int | None) -> Iterator[GateQuestion]:
    """All that the protocol asks about a suite: the same questions of every gate.

    Args:
        tests: test questions of each task and of the base, at most; None for all.
    """
    for task in suite.tasks:
        yield from own_questions(task.name, task.train, task.test[:tests], Random(f"protocol {task.name}"))
    train = {task.name: task.train for task in suite.tasks}
    yield from other_questions(NEAR_MISSES[suite.name], train, suite.base.test[:tests], Random("protocol"))


def ask(backbone: Backbone, gates: Sequence[Gate], questions: Iterable[GateQuestion]) -> list[list[Asked]]:
    """What each gate decides on each question; all look at the same layers, so that values are computed once."""
    decided: list[list[Asked]] = [[] for _ in gates]
    (looked_at,) = {(gate.layers, gate.marks) for gate in gates}
    left = iter(questions)
    while part := list(itertools.islice(left, AT_ONCE)):
        values = token_values(backbone, encode_questions(backbone, part, STYLES), *looked_at)  # n of [t, S, F]
        for gate, asked in zip(gates, decided, strict=True):
            rule = gate.rule
            for question, evidence in zip(part, evidence_in(gate, values).numpy(), strict=True):
                decision = rule.decide(evidence)
                asked.append(Asked(question.kind, question.task, decision.task, decision.closed))
    return decided
