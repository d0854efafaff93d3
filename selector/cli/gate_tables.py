"""A relevance gate as the commands show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import torch
from rich.console import Console
from rich.table import Table

from inducekv_vllm.bundle import Bundle, Gate

from ..update.measures import stored_gate_bytes

if TYPE_CHECKING:
    from ..gate.fit import FittedGate

WIDTH: Final = 1000  # of a table at most: for people and pipes alike, never wrapped to the terminal's width
BASE_KINDS: Final = {"plain": "base", "wrapped": "base, wrapped", "other": "base, varied"}  # of a fit's questions


def print_table(table: Table) -> None:
    """Cells are text as it is: names and questions may have brackets."""
    Console(soft_wrap=True, highlight=False, markup=False, emoji=False, width=WIDTH).print(table)


def print_fitted(fitted: FittedGate) -> None:
    """What other shares of missed questions would cost, and why the gate may be of no use."""
    print_prices([asdict(price) for price in fitted.prices], fitted.misses)
    print_warnings(fitted.warnings)


def print_warnings(warnings: Sequence[str]) -> None:
    for warning in warnings:
        print(f"warning: {warning}; docs/gate.md")


def print_prices(prices: Sequence[Mapping[str, Any]], misses: float) -> None:
    """What other shares of missed questions would cost.

    Args:
        prices: `selector.gate.training.Price` as JSON values.
        misses: the share in force.
    """
    print("\nquestions of no task that open the gate, by the share of own questions that it may miss (* in force):")
    kinds = list(dict.fromkeys(kind for price in prices for kind in price["opened"]))
    table = Table("misses", *(BASE_KINDS.get(kind, kind) for kind in kinds), box=None)
    for price in prices:
        mark = " *" if price["misses"] == misses else ""
        opened = (price["opened"].get(kind) for kind in kinds)
        table.add_row(f"{price['misses']:.1%}{mark}", *("-" if share is None else f"{share:.1%}" for share in opened))
    print_table(table)


def gate_summary(bundle: Bundle) -> dict[str, str]:
    """The lines of `inducekv-bundle inspect`."""
    if (gate := bundle.gate) is None:
        return {"relevance gate": "none"}
    thresholds = ", ".join(
        f"{task} (threshold {threshold:.4g})"
        for task, threshold in zip(gate.tasks, gate.thresholds.tolist(), strict=True)
    )
    layers = " and ".join(map(str, gate.layers))
    marks = f"turns begin with {list(gate.marks.begin)}" if gate.marks.begin else "no turn marks"
    end = "" if gate.marks.end is None else f", end with {gate.marks.end}"
    looks_with = f"{gate.prototypes.shape[1]} prototypes of each"
    if gate.classified:
        looks_with = f"their means and the question's words, in classifiers of {gate.classified} tasks"
    return {
        "relevance gate": f"{thresholds}; {stored_gate_bytes(bundle)} bytes",
        "gate looks at": f"values of layer {layers}, {looks_with}; {marks}{end}",
    }


def gate_differences(old: Gate | None, new: Gate | None) -> list[str]:
    """One line for each; of the tasks that both gates have. The metadata's differences list tasks and layers."""
    if old is None or new is None:
        return []
    lines: list[str] = []
    before, after = old.tensors(), new.tensors()
    for name in dict.fromkeys((*before, *after)):
        if name in ("gate_weights", "gate_thresholds"):
            continue
        if name not in before or name not in after:
            lines.append(f"{name.replace('_', ' ')}: {'new' if name in after else 'gone'}")
        else:
            lines += tensor_difference(name.replace("_", " "), before[name], after[name])
    for task in old.tasks:
        if task in new.tasks:
            row, now = old.tasks.index(task), new.tasks.index(task)
            lines += tensor_difference(f"gate weights of {task}", old.weights[row], new.weights[now])
            lines += tensor_difference(f"gate threshold of {task}", old.thresholds[row], new.thresholds[now])
    return lines


def tensor_difference(name: str, before: torch.Tensor, after: torch.Tensor) -> list[str]:
    if before.shape != after.shape:
        return [f"{name}: shape {list(before.shape)} -> {list(after.shape)}"]
    if torch.equal(before, after):
        return []
    return [f"{name}: largest change {float((before.float() - after.float()).abs().max()):.4g}"]
