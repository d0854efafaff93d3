"""The page's figures, as `data:` addresses of images. Shapes: T tasks."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.continual.comparison import Streams
from benchmarks.continual.diagnostics.__main__ import DIAGNOSTICS
from benchmarks.continual.diagnostics.drawing import blank
from benchmarks.continual.report.names import title
from benchmarks.continual.report.ranking import AP, BASE
from benchmarks.continual.report.tables import by_accuracy
from inducekv_vllm.errors import ConfigError
from selector.report.plots import Panel, bars, png, style

COLUMNS = 5  # matrices side by side


def accuracy_bars(streams: Streams, methods: Sequence[str]) -> str:
    """AP and base accuracy with their standard errors, a bar for each budget."""
    budgets = [budget for budget in streams.budgets if streams.methods(budget)]
    panels = []
    for label, score in (("AP (%)", AP), ("base questions, at the end (%)", BASE)):
        means = {
            f"{budget} entries": [
                streams.mean(method, budget, score) if streams.of(method, budget) else None for method in methods
            ]
            for budget in budgets
        }
        values = {name: [100 * mean.value if mean else None for mean in row] for name, row in means.items()}
        errors = {name: [100 * ((mean and mean.standard_error) or 0.0) for mean in row] for name, row in means.items()}
        panels.append(Panel(label, values, limits=(0, 118), errors=errors, digits=".1f"))
    return bars([title(method) for method in methods], panels, png)


def matrices(streams: Streams, budget: int) -> str:
    """a[i, t] of every method, [T, T], means over its seeds."""
    methods = by_accuracy(streams, budget)
    size, rows = len(streams.tasks), math.ceil(len(methods) / COLUMNS)
    with style():
        canvas = blank(0.9 + 1.7 * rows)
        for place, method in enumerate(methods):
            axes = canvas.add_subplot(rows, COLUMNS, place + 1)
            mean = 100 * mean_matrix(streams, method, budget)
            image = axes.imshow(mean, vmin=0, vmax=100, cmap="viridis", aspect="auto")
            axes.set_title(textwrap.fill(title(method), 26), fontsize=6.5)
            names = streams.tasks if place % COLUMNS == 0 else []
            axes.set_yticks(range(size) if names else [], names, fontsize=6.5)
            last = place >= len(methods) - COLUMNS
            axes.set_xticks(range(size) if last else [], streams.tasks if last else [], rotation=90, fontsize=6.5)
            axes.grid(False)
        canvas.colorbar(image, ax=canvas.axes, label="accuracy (%)", shrink=0.5)
        return png(canvas)


def mean_matrix(streams: Streams, method: str, budget: int) -> np.ndarray:
    """a[i, t] over the complete seeds, [T, T] float64; NaN for tasks not yet seen."""
    runs = list(streams.of(method, budget).values())
    matrix = np.full((len(streams.tasks),) * 2, math.nan)
    for i in range(len(matrix)):
        matrix[i, : i + 1] = np.mean([run["accuracy"][i][: i + 1] for run in runs], axis=0)
    return matrix


def diagnostic_plot(content: Mapping[str, Any]) -> str | None:
    """The figure of a diagnostic's JSON; None for an unknown diagnostic. Raises ConfigError: it cannot be drawn."""
    diagnostic = DIAGNOSTICS.get(content["diagnostic"])
    if diagnostic is None:
        return None
    try:
        with style():
            return png(diagnostic.plot(dict(content)))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"diagnostic {content['diagnostic']!r} cannot be drawn: {error!r}") from error
