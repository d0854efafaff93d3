"""How much of each task, and of the base questions, is forgotten while others are learned.

The accuracy matrix a[i, t] of the chosen method, and over the stream, for every method with the same budget: the mean
accuracy on the tasks seen so far, and the accuracy on the base questions. Means over the seeds.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.continual.comparison import UNTOUCHED
from benchmarks.continual.diagnostics.drawing import blank, heatmap, name_ticks
from benchmarks.continual.diagnostics.statistics import Group, describe_runs, mean_and_error
from benchmarks.continual.metrics import average_forgetting
from benchmarks.continual.results import Finished, FinishedRun
from selector.report.plots import COLOURS, STROKES, finite

SOURCE = "Metrics and Continual Learning Scores"
MARKERS = "os^v"


def add_arguments(parser: ArgumentParser) -> None:
    pass


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs = finished.chosen(options)
    groups: dict[str, Group] = {}
    for run in sorted(finished.complete, key=lambda run: run.method):
        if run.method == UNTOUCHED or run.budget == runs[0].budget:  # the untouched model has no budget
            groups.setdefault(run.method, []).append(run)
    methods = {method: over_the_stream(group) for method, group in groups.items()}
    methods[runs[0].method] = over_the_stream(runs)
    return {
        "finding": _finding(runs, methods),
        **describe_runs(runs),
        "tasks": runs[0].order,
        "matrix": np.mean([run.accuracy for run in runs], axis=0).tolist(),
        "methods": methods,
    }


def over_the_stream(runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """After each of T tasks, means over the seeds and their standard errors, [T] each."""
    seen = [[float(run.accuracy[i, : i + 1].mean()) for i in range(len(run.order))] for run in runs]
    return {
        "seeds": [run.seed for run in runs],
        "AF": float(np.mean([average_forgetting(run.accuracy) for run in runs])),
        "seen": _mean_and_error(seen),
        "base": _mean_and_error([run.base for run in runs]),
    }


def _mean_and_error(of_runs: Sequence[Sequence[float]]) -> dict[str, list[float | None]]:
    after_tasks = [mean_and_error(values) for values in zip(*of_runs, strict=True)]  # [T]
    return {name: [row[name] for row in after_tasks] for name in ("mean", "standard_error")}


def _finding(runs: Sequence[FinishedRun], methods: dict[str, Any]) -> str:
    mine = methods[runs[0].method]
    base = mine["base"]["mean"]
    before = f" (untouched: {methods[UNTOUCHED]['base']['mean'][-1]:.3f})" if UNTOUCHED in methods else ""
    return (
        f"{runs[0].method} loses {mine['AF']:.3f} of accuracy on a task, on average, between its best and the end of "
        f"the stream; on base questions it has {base[0]:.3f} after the first task and {base[-1]:.3f} at last{before}."
    )


def plot(measured: dict[str, Any]) -> Figure:
    methods, tasks = measured["methods"], measured["tasks"]
    heights = [1.6 + 0.3 * len(tasks), max(3.2, 0.6 + 0.19 * len(methods))]  # inches
    figure = blank(sum(heights))
    matrix, lines = figure.subfigures(2, 1, height_ratios=heights)
    axes = matrix.subplots()
    heatmap(axes, measured["matrix"], tasks, tasks, f"accuracy of {measured['method']}", limits=(0, 1))
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
                linewidth=2.2 if method == measured["method"] else 1.0,
                capsize=2,
                label=method if name == "base" else None,
            )
        name_ticks(axes, tasks)
        axes.set(ylabel=label, xlabel="after learning", ylim=(-0.02, 1.02))
    lines.legend(frameon=False, fontsize=8, loc="outside right center")
    return figure


def _look(number: int) -> tuple[str, str, str]:
    """Colour, stroke and marker of a line: neighbours differ in colour and stroke, and 64 lines in something."""
    colour, turn = number % len(COLOURS), number // len(COLOURS)
    marker = MARKERS[turn // len(STROKES) % len(MARKERS)]
    return COLOURS[colour], STROKES[(colour + turn) % len(STROKES)], marker
