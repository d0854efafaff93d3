"""The page's figures, each of streams alone. Letters: T tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from benchmarks.continual.comparison import Score, Streams, final_accuracy
from benchmarks.continual.diagnostics.drawing import blank, heatmap, png
from benchmarks.continual.report.names import RECIPES, is_ours, title
from benchmarks.continual.report.sentences import AP, BASE
from benchmarks.continual.report.tables import by_accuracy
from selector.report.parts import picture
from selector.report.plots import COLOURS

A_ROW = 3  # matrices


def drawn(draw: Callable[[], Figure], name: str, said: str) -> str:
    """A figure in pixels, its title and a sentence."""
    return picture(png(lambda _: draw(), {}), name, said)


def bars_of_accuracy(streams: Streams, budget: int) -> str:
    """AP and base accuracy of every method with their standard errors."""
    methods = by_accuracy(streams, budget)

    def draw() -> Figure:
        canvas = blank(1.0 + 0.28 * len(methods))
        panels: tuple[tuple[str, Score], ...] = (("AP (%)", AP), ("base questions, at the end (%)", BASE))
        for place, (label, score) in enumerate(panels):
            axes = canvas.add_subplot(1, len(panels), place + 1)
            found = [streams.mean(method, budget, score) for method in methods]
            axes.barh(
                range(len(methods)),
                [100 * one.value for one in found],
                xerr=[100 * (one.standard_error or 0.0) for one in found],
                color=[_colour(method) for method in methods],
                error_kw={"elinewidth": 1, "capsize": 2},
            )
            axes.set_yticks(range(len(methods)), [title(method) for method in methods] if place == 0 else [])
            axes.set(xlabel=label, xlim=(0, 100))
            axes.invert_yaxis()
        return canvas

    return drawn(
        draw,
        f"Accuracy with {budget} entries",
        "Left: all tasks' questions after the last task. Right: questions the model could answer before any of them. "
        "Longer is better; InduceKV's recipes are blue, their ablations green; whiskers are standard errors.",
    )


def heatmap_of_tasks(streams: Streams, budget: int) -> str:
    """Final accuracy, methods by tasks and the base."""
    methods = by_accuracy(streams, budget)
    scores = [*(final_accuracy(task) for task in streams.tasks), BASE]
    values = {
        method: np.array([100 * streams.mean(method, budget, score).value for score in scores]) for method in methods
    }

    def draw() -> Figure:
        return _heatmap(values, [*streams.tasks, "base"])

    return drawn(
        draw,
        f"Accuracy after the last task, {budget} entries",
        "Each row is a method, each column a task in the order of learning; the last column are the base questions.",
    )


def matrices(streams: Streams, budget: int) -> str:
    """a[i, t] of every method, [T, T], means over its seeds."""
    methods = by_accuracy(streams, budget)
    size = len(streams.tasks)

    def draw() -> Figure:
        rows = math.ceil(len(methods) / A_ROW)
        canvas = blank(0.6 + 2.5 * rows)
        for place, method in enumerate(methods):
            axes = canvas.add_subplot(rows, A_ROW, place + 1)
            image = axes.imshow(
                100 * mean_matrix(streams, method, budget), vmin=0, vmax=100, cmap="viridis", aspect="auto"
            )
            axes.set_title(title(method), fontsize=8)
            names = streams.tasks if place % A_ROW == 0 else []
            axes.set_yticks(range(size) if names else [], names, fontsize=7)
            last = place >= len(methods) - A_ROW
            axes.set_xticks(range(size) if last else [], streams.tasks if last else [], rotation=90, fontsize=7)
            axes.grid(False)
        canvas.colorbar(image, ax=canvas.axes, label="accuracy (%)", shrink=0.5)
        return canvas

    return drawn(
        draw,
        f"What is left of each task as others follow, {budget} entries",
        "A row of a square stands for the state after learning the task named at its left; a column for the questions "
        "of one task. Darker from top to bottom in a column means forgetting; white is not learned yet.",
    )


def mean_matrix(streams: Streams, method: str, budget: int) -> np.ndarray:
    """a[i, t] over the complete seeds, [T, T] float64; NaN for tasks not yet seen."""
    runs = list(streams.of(method, budget).values())
    found = np.full((len(streams.tasks),) * 2, math.nan)
    for i in range(len(found)):
        found[i, : i + 1] = np.mean([run["accuracy"][i][: i + 1] for run in runs], axis=0)
    return found


def heatmap_of_base(streams: Streams, budget: int) -> str:
    """Base accuracy after each task, methods by tasks."""
    values = {method: 100 * _mean_base(streams, method, budget) for method in by_accuracy(streams, budget)}

    def draw() -> Figure:
        return _heatmap(values, streams.tasks)

    return drawn(
        draw,
        f"What the model could do before, {budget} entries",
        "Accuracy on the base questions after each task was learned, from left to right.",
    )


def _heatmap(values: Mapping[str, np.ndarray], columns: Sequence[str]) -> Figure:
    """Percentages of methods, [number of columns] each."""
    canvas = blank(1.6 + 0.26 * len(values))
    rows = [[float(value) for value in row] for row in values.values()]
    names = [title(method) for method in values]
    heatmap(canvas.add_subplot(), rows, names, columns, "accuracy (%)", (0, 100), ".0f")
    return canvas


def _mean_base(streams: Streams, method: str, budget: int) -> np.ndarray:
    """Over the complete seeds, [T] float64."""
    return np.mean([run["base"] for run in streams.of(method, budget).values()], axis=0)


def _colour(method: str) -> str:
    if method in RECIPES:
        return COLOURS[0]
    return COLOURS[2] if is_ours(method) else "#777777"
