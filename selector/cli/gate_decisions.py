"""What a bundle's gate decides on questions whose task is known, as `inducekv-bundle eval` prints it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.table import Table

from inducekv_vllm.bundle import Gate

from .asking import Decided
from .common import print_table

if TYPE_CHECKING:
    from torch import Tensor

    from ..data.examples import Example

NO_TASK: Final = "no task"


@dataclass(frozen=True)
class Asked:
    """A question, and where it belongs."""

    example: Example
    task: str | None  # None: no task of the bundle
    kind: str  # the file that it stands in


@dataclass(frozen=True)
class Outcomes:
    """How often the gate decided what, on the questions of one task and kind."""

    task: str | None
    kind: str
    questions: int
    routed: int  # to the task
    opened: int  # for any task
    wrong: int  # opened for another task, of questions that have one
    outside: int
    below_threshold: int


def outcomes(asked: Sequence[Asked], decisions: Sequence[Decided]) -> list[Outcomes]:
    """Counts by task and kind, in the order in which they are asked."""
    groups: dict[tuple[str | None, str], list[Decided]] = {}
    for question, decision in zip(asked, decisions, strict=True):
        groups.setdefault((question.task, question.kind), []).append(decision)
    rows = []
    for (task, kind), found in groups.items():
        opened = [each.task for each in found if each.task is not None]
        closed = Counter(each.closed for each in found if each.task is None)
        routed = 0 if task is None else opened.count(task)
        wrong = 0 if task is None else len(opened) - routed
        counts = (len(found), routed, len(opened), wrong, closed["outside"], closed["below_threshold"])
        rows.append(Outcomes(task, kind, *counts))
    return rows


def read_asked(path: Path, gate: Gate) -> list[Asked]:
    from ..gate.background import read_background

    examples = read_background(path)
    own = () if path.suffix == ".txt" else gate.tasks
    return [Asked(each, each.task if each.task in own else None, path.stem) for each in examples]


def decided(gate: Gate, evidence: Tensor) -> list[Decided]:
    """
    Args:
        evidence: [n, H] float32, of n questions for the gate's prototypes.
    """
    decisions = [gate.rule.decide(found) for found in evidence.numpy()]
    return [Decided(each.task, each.closed) for each in decisions]


def print_outcomes(rows: Sequence[Outcomes]) -> None:
    head = ("questions", "to the task", "opened", "to another task", "closed: outside", "closed: below threshold")
    table = Table("task", "kind", *head, box=None)
    for row in rows:
        own = [str(count) if row.task is not None else "-" for count in (row.routed, row.wrong)]
        counts = [own[0], str(row.opened), own[1], str(row.outside), str(row.below_threshold)]
        table.add_row(row.task if row.task is not None else NO_TASK, row.kind, str(row.questions), *counts)
    print_table(table)
