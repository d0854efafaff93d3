"""Pictures of diagnostics, in the style of the selector's reports (`selector.report.plots`)."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from selector.report.plots import WIDTH, Numbers, finite, style

DOTS_PER_INCH = 120


def blank(height: float) -> Figure:
    """An empty figure of the reports' width; `height` in inches."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def png(plot: Callable[[dict[str, Any]], Figure], measured: dict[str, Any]) -> bytes:
    """The figure of `plot`: the same numbers give the same bytes, with every version of matplotlib its own."""
    data = io.BytesIO()
    with style():
        plot(measured).savefig(data, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return data.getvalue()


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
    digits: str = ".2g",
) -> None:
    """Values [number of rows, number of columns] in colours with their numbers; what is missing stays blank.

    A scale of the colours stands beside it if it has a `label`; `digits` is the numbers' format.
    """
    matrix = np.array([finite(row) for row in values])
    low, high = limits or (float(np.nanmin(matrix)), float(np.nanmax(matrix)))
    image = axes.imshow(matrix, vmin=low, vmax=high, cmap="viridis", aspect="auto")
    for (row, column), value in np.ndenumerate(matrix):
        if not np.isnan(value):
            colour = "white" if value < (low + high) / 2 else "black"
            axes.text(column, row, format(value, digits), ha="center", va="center", color=colour, fontsize=7)
    name_ticks(axes, columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(False)
    figure = axes.get_figure()
    assert figure is not None
    if label is not None:
        figure.colorbar(image, ax=axes, label=label)
