"""What pages are made of: tables, numbers for people, and the templates, which escape every string."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .plots import plain


@dataclass(frozen=True)
class Table:
    """Rows under their head; a cell is text, a number or another JSON value. A place is (row, column), from 0."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    chosen: Collection[int] = ()  # rows in bold
    marked: Collection[tuple[int, int]] = ()  # places of cells in bold
    shares: Mapping[tuple[int, int], float] = field(default_factory=dict)  # 0 to 1: how dark the cell at a place is
    kind: Literal["", "wide", "prose"] = ""  # wide: may be broader than the page; prose: cells hold words


def render(package: str, template: str, **values: Any) -> str:
    """The page of a template of `package`, which may extend and import those of this package."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("selector.report")]),
        autoescape=True,
        finalize=_cell,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)


def _cell(value: Any) -> str:
    """A value as the page shows it; what a template has made already stays as it is."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, str):
        return plain(value)
    return number(value) if value is None or isinstance(value, int | float) else plain(json.dumps(value))


def number(value: Any, digits: int = 4) -> str:
    """A number for people; a dash for a missing one, and words for one that is not finite."""
    if value is None:
        return "–"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.{digits}g}" if math.isfinite(value) else ("not a number" if math.isnan(value) else "infinite")
    return str(value)


def percent(value: Any) -> float | None:
    """A share as a percentage; None if it is no number."""
    return 100 * value if is_number(value) else None


def counted(amount: int, singular: str, plural: str) -> str:
    """An amount with its noun."""
    return f"{amount:,} {singular if amount == 1 else plural}"


def byte_size(amount: float) -> str:
    """Bytes in the largest binary unit that gives at least 1."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= size:
            return f"{amount / size:.2f} {unit}"
    return f"{amount} bytes"


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a number, and a finite one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
