"""The protocol's result as tables of text, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from benchmarks.gate.gates import MeasuredGate
from benchmarks.gate.table import Measure, Row, Share


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
        seconds = gate.facts.get("seconds", {})
        took = "".join(f", {name} {value:.1f} s" for name, value in seconds.items())
        name = f"seed {gate.facts['seed']}" if "seed" in gate.facts else gate.facts["bundle"]
        console.print(f"gate of {name}: {len(gate.gate.tasks)} tasks, {gate.bytes} bytes{took}", highlight=False)


def as_json(rows: Sequence[Row], gates: Sequence[MeasuredGate]) -> dict[str, Any]:
    return {
        "gates": [{**gate.facts, "tasks": gate.gate.tasks, "bytes": gate.bytes} for gate in gates],
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
