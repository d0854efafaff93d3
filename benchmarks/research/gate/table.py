"""The protocol's table: a row for each way of asking, with its goal; and where a goal is missed; as text and as JSON.

Numbers are shares of the questions asked, means over the gates with the lowest and highest gate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Column, Table

from benchmarks.research.gate.asking import Asked, MeasuredGate

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


def print_tables(rows: Sequence[Row], tasks: Sequence[str], console: Console) -> None:
    own = [row for row in rows if "routed" in row.shares]
    console.print(_kinds(own, "questions of the tasks", "routed", "another_task"))
    console.print(_kinds([row for row in rows if row not in own], "questions of no task", "opened"))
    by_task = Table("routed to its task", *(Column(task, justify="right") for task in tasks))
    for row in own:
        found = [row.by_task.get(task) for task in tasks]
        by_task.add_row(row.kind, *("" if shares is None else f"{shares['routed']:.3f}" for shares in found))
    console.print(by_task)
    for row in rows:
        for miss in row.misses:
            where = ", ".join(f"{task} {share:.3f}" for task, share in miss.tasks.items()) or "no task more than others"
            goal = f"{miss.measure.replace('_', ' ')} {row.shares[miss.measure].mean:.3f}, goal {miss.goal:.2f}"
            console.print(f"missed: {row.kind}: {goal}, by {miss.by:.3f}: {where}", highlight=False)


def print_gates(gates: Sequence[MeasuredGate], console: Console) -> None:
    for gate in gates:
        seconds = gate.details.get("seconds", {})
        took = "".join(f", {name} {value:.1f} s" for name, value in seconds.items())
        name = f"seed {gate.details['seed']}" if "seed" in gate.details else gate.details["bundle"]
        console.print(f"gate of {name}: {len(gate.gate.tasks)} tasks, {gate.bytes} bytes{took}", highlight=False)


def as_json(rows: Sequence[Row], gates: Sequence[MeasuredGate]) -> dict[str, Any]:
    return {
        "gates": [{**gate.details, "tasks": gate.gate.tasks, "bytes": gate.bytes} for gate in gates],
        "rows": [{**asdict(row), "misses": [asdict(miss) for miss in row.misses]} for row in rows],
    }


def _kinds(rows: Sequence[Row], title: str, *with_goals: Measure) -> Table:
    measures: tuple[Measure, ...] = (*with_goals, "outside", "below_threshold")
    head = [Column(title), Column("asked", justify="right")]
    for measure in measures:
        head.append(Column(measure.replace("_", " "), justify="right"))
        head += [Column("goal", justify="right")] if measure in with_goals else []
    table = Table(*head)
    for row in rows:
        missed = {miss.measure for miss in row.misses}
        cells = []
        for measure in measures:
            cells.append(_cell(row.shares[measure]))
            if measure in with_goals:
                cells.append(f"{row.goals[measure]:.2f}{' !' if measure in missed else '  '}" if row.goals else "")
        table.add_row(row.kind, str(row.asked), *cells)
    return table


def _cell(share: Share) -> str:
    spread = "" if share.lowest == share.highest else f" ({share.lowest:.3f}–{share.highest:.3f})"
    return f"{share.mean:.3f}{spread}"
