"""What is kept of each task while others are learned, and of what the model could do before.

The accuracy matrix a[i, t] of the chosen method, and over the stream, for every method with the same budget: the mean
accuracy on the tasks seen so far, and the accuracy on the base questions. Means over the seeds.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.continual.comparison import UNTOUCHED
from benchmarks.continual.diagnostics.drawing import blank, heatmap
from benchmarks.continual.metrics import average_forgetting, standard_error
from benchmarks.continual.results import Finished, FinishedRun
from selector.report.plots import COLOURS, STROKES, finite

MARKERS = "os^v"


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs = finished.chosen(options)
    of_methods = {
        method: comparable
        for method in sorted({run.method for run in finished.complete})
        if (comparable := [run for run in finished.complete if run.method == method and is_comparable(run, runs[0])])
    }
    methods = {method: over_the_stream(of_method) for method, of_method in of_methods.items()}
    methods[runs[0].method] = over_the_stream(runs)
    return {
        "diagnostic": "forgetting",
        "source": "Metrics and Continual Learning Scores",
        "says": _said(runs, methods),
        "method": runs[0].method,
        "budget": runs[0].budget,
        "seeds": [run.seed for run in runs],
        "tasks": runs[0].order,
        "matrix": np.mean([run.accuracy for run in runs], axis=0).tolist(),
        "methods": methods,
    }


def is_comparable(run: FinishedRun, chosen: FinishedRun) -> bool:
    """Whether a run has the chosen one's budget; the untouched model has none."""
    return run.method == UNTOUCHED or run.budget == chosen.budget


def over_the_stream(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """After each of T tasks, means over the seeds and their standard errors, [T] each."""
    seen = [[float(run.accuracy[i, : i + 1].mean()) for i in range(len(run.order))] for run in runs]
    return {
        "seeds": [run.seed for run in runs],
        "AF": float(np.mean([average_forgetting(run.accuracy) for run in runs])),
        "seen": _mean_and_error(seen),
        "base": _mean_and_error([run.base for run in runs]),
    }


def _mean_and_error(of_runs: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    after_tasks = list(zip(*of_runs, strict=True))  # [T] of the runs' values
    return {
        "mean": [float(np.mean(values)) for values in after_tasks],
        "standard_error": [standard_error(values) for values in after_tasks],
    }


def _said(runs: Sequence[FinishedRun], methods: dict[str, Any]) -> str:
    mine = methods[runs[0].method]
    base = mine["base"]["mean"]
    before = f" (untouched: {methods[UNTOUCHED]['base']['mean'][-1]:.3f})" if UNTOUCHED in methods else ""
    return (
        f"{runs[0].method} loses {mine['AF']:.3f} of accuracy on a task, on average, between its best and the end of "
        f"the stream; on base questions it has {base[0]:.3f} after the first task and {base[-1]:.3f} at last{before}."
    )


def plot(found: dict[str, Any]) -> Figure:
    methods, tasks = found["methods"], found["tasks"]
    heights = [1.6 + 0.3 * len(tasks), max(3.2, 0.6 + 0.19 * len(methods))]  # inches
    figure = blank(sum(heights))
    matrix, lines = figure.subfigures(2, 1, height_ratios=heights)
    axes = matrix.subplots()
    heatmap(axes, found["matrix"], tasks, tasks, f"accuracy of {found['method']}", limits=(0, 1))
    axes.set(xlabel="asked about", ylabel="after learning")
    panels = lines.subplots(1, 2)
    labels = (("seen", "accuracy on tasks seen so far"), ("base", "accuracy on base questions"))
    for axes, (name, label) in zip(panels, labels, strict=True):
        for number, (method, values) in enumerate(methods.items()):
            colour, stroke, marker = _look(number)
            axes.errorbar(
                range(len(tasks)),
                finite(values[name]["mean"]),
                np.nan_to_num(finite(values[name]["standard_error"])),
                color=colour,
                linestyle=stroke,
                marker=marker,
                markersize=3,
                linewidth=2.2 if method == found["method"] else 1.0,
                capsize=2,
                label=method if name == "base" else None,
            )
        axes.set_xticks(range(len(tasks)), tasks, rotation=45, ha="right", rotation_mode="anchor")
        axes.set(ylabel=label, xlabel="after learning", ylim=(-0.02, 1.02))
    lines.legend(frameon=False, fontsize=8, loc="outside right center")
    return figure


def _look(number: int) -> tuple[str, str, str]:
    """Colour, stroke and marker of a line: neighbours differ in colour and stroke, and 64 lines in something."""
    colour, turn = number % len(COLOURS), number // len(COLOURS)
    marker = MARKERS[turn // len(STROKES) % len(MARKERS)]
    return COLOURS[colour], STROKES[(colour + turn) % len(STROKES)], marker
