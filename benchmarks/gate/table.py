"""The protocol's table: a row for each way of asking, with its goal; and where a goal is missed.

Numbers are shares of the questions asked, means over the gates with the lowest and highest gate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.gate.asking import Asked

Measure = Literal["routed", "another_task", "opened", "outside", "below_threshold"]
COUNTS: Final[Mapping[Measure, Callable[[Asked], bool]]] = {
    "routed": lambda one: one.routed == one.task,
    "another_task": lambda one: one.routed not in (one.task, None),
    "opened": lambda one: one.routed is not None,
    "outside": lambda one: one.closed == "outside",
    "below_threshold": lambda one: one.closed == "below_threshold",
}
OF_TASK: Final[Sequence[Measure]] = ("routed", "another_task", "outside", "below_threshold")
OF_NO_TASK: Final[Sequence[Measure]] = ("opened", "outside", "below_threshold")
# Of a task's own questions, how many are routed to it, at least.
ROUTED: Final = {
    "plain": 0.98,
    "wrapped": 0.97,
    "other wording, a word shared": 0.95,
    "system prompt": 0.95,
    "second turn": 0.95,
    "40 words before": 0.90,
    "40 words after": 0.90,
    "another picture style": 0.90,
}
ANOTHER_TASK: Final = 0.01  # of each of these kinds, sent to another task, at most
# Of questions of no task, how many open the gate, at most.
OPENED: Final = {
    "base": 0.02,
    "base, wrapped": 0.02,
    "everyday": 0.01,
    "everyday, with a picture": 0.01,
    "near-misses": 0.05,
    "near-misses, a word shared": 0.05,
    "noise": 0.02,
}


@dataclass(frozen=True)
class Share:
    mean: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class Miss:
    """A goal that is not reached."""

    measure: Measure
    goal: float
    by: float
    tasks: Mapping[str, float]  # the shares of the tasks that miss it; of `opened`, the tasks that questions went to


@dataclass(frozen=True)
class Row:
    """One way of asking a task's own questions, or one kind of questions of no task."""

    kind: str
    asked: int
    shares: Mapping[Measure, Share]
    goals: Mapping[Measure, float]
    by_task: Mapping[str, Mapping[Measure, float]]  # means; of questions of no task: how many opened the gate for it

    @property
    def misses(self) -> list[Miss]:
        found = []
        for measure, goal in self.goals.items():
            sign = 1 if measure == "routed" else -1
            by = sign * (goal - self.shares[measure].mean)
            of_task = {task: shares[measure] for task, shares in self.by_task.items()}
            least = 0.0 if measure == "opened" else sign * goal
            tasks = {task: share for task, share in of_task.items() if sign * share < least}
            if by > 1e-9:
                found.append(Miss(measure, goal, by, dict(sorted(tasks.items(), key=lambda item: sign * item[1]))))
        return found


def rows_of(asked: Sequence[Sequence[Asked]]) -> list[Row]:
    """A row for each kind, in the order of the questions; `asked` has what each gate decided on the same questions."""
    kinds = dict.fromkeys(one.kind for one in asked[0])
    return [_row(kind, [[one for one in of_gate if one.kind == kind] for of_gate in asked]) for kind in kinds]


def _row(kind: str, asked: Sequence[Sequence[Asked]]) -> Row:
    shares, of_task = {}, asked[0][0].task is not None
    for measure in OF_TASK if of_task else OF_NO_TASK:
        each = [_share(of_gate, measure) for of_gate in asked]
        shares[measure] = Share(sum(each) / len(each), min(each), max(each))
    every = [one for of_gate in asked for one in of_gate]
    by_task = _of_each_task(every) if of_task else _opened_for_each_task(every)
    return Row(kind, len(asked[0]), shares, _goals(kind, of_task), by_task)


def _of_each_task(asked: Sequence[Asked]) -> dict[str, dict[Measure, float]]:
    own: dict[str, list[Asked]] = {}
    for one in asked:
        own.setdefault(str(one.task), []).append(one)
    return {task: {measure: _share(of_task, measure) for measure in OF_TASK} for task, of_task in own.items()}


def _opened_for_each_task(asked: Sequence[Asked]) -> dict[str, dict[Measure, float]]:
    counts = Counter(one.routed for one in asked if one.routed is not None)
    return {task: {"opened": count / len(asked)} for task, count in counts.items()}


def _goals(kind: str, of_task: bool) -> dict[Measure, float]:
    if of_task:
        return {"routed": ROUTED[kind], "another_task": ANOTHER_TASK} if kind in ROUTED else {}
    return {"opened": OPENED[kind]} if kind in OPENED else {}


def _share(asked: Sequence[Asked], measure: Measure) -> float:
    return sum(map(COUNTS[measure], asked)) / len(asked)
