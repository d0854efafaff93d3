"""What the commands print of a gate's fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from .common import print_table

if TYPE_CHECKING:
    from ..gate.fit import FittedGate

BASE_KINDS: Final = {"plain": "base", "wrapped": "base, wrapped", "other": "base, varied"}  # of a fit's questions


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
