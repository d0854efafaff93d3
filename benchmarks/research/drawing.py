"""Figures: the same numbers give the same bytes, with every version of matplotlib its own.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart; lines and bars differ in stroke or hatch
too. Numbers that are missing or not finite leave a gap.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
STROKES = ("-", "--", "-.", ":")
HATCHES = ("", "///", "...", "xxx")
WIDTH = 9.0  # inches
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "text.parse_math": False,  # names may hold a dollar sign
}

Numbers = Sequence[float | None]


def png(plot: Callable[..., Figure], *arguments: Any, dots_per_inch: int = 100) -> bytes:
    """The figure that `plot` makes of the arguments."""
    data = io.BytesIO()
    with mpl.rc_context(STYLE):
        plot(*arguments).savefig(data, format="png", dpi=dots_per_inch, metadata={"Software": None})
    return data.getvalue()


def blank(height: float, width: float = WIDTH) -> Figure:
    """An empty figure; sizes in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def finite(values: Numbers) -> list[float]:
    """The values, with NaN for what is missing or not finite."""
    return [float(value) if value is not None and math.isfinite(value) else math.nan for value in values]


def name_ticks(axes: Axes, names: Sequence[str]) -> None:
    """Names along the x axis, one for each of the places 0, 1, ..., slanted."""
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")


def heatmap(
    axes: Axes,
    values: Sequence[Numbers],
    rows: Sequence[str],
    columns: Sequence[str],
    label: str | None = None,
    limits: tuple[float, float] | None = None,
) -> None:
    """Values [number of rows, number of columns] in colours with their numbers; what is missing stays blank.

    A scale of the colours stands beside it if it has a `label`.
    """
    matrix = np.array([finite(row) for row in values])
    low, high = limits or (float(np.nanmin(matrix)), float(np.nanmax(matrix)))
    image = axes.imshow(matrix, vmin=low, vmax=high, cmap="viridis", aspect="auto")
    for (row, column), value in np.ndenumerate(matrix):
        if not np.isnan(value):
            colour = "white" if value < (low + high) / 2 else "black"
            axes.text(column, row, format(value, ".2g"), ha="center", va="center", color=colour, fontsize=7)
    name_ticks(axes, columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(False)
    figure = axes.get_figure()
    assert figure is not None
    if label is not None:
        figure.colorbar(image, ax=axes, label=label)
