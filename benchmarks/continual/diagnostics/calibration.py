"""What the calibration becomes over the stream, and what it gains over a fixed one.

After each task: the temperature tau_t, the mean value gate and the mean layer bias of the memory, as means over the
seeds. If the run has a method that differs only in a fixed calibration (tau 0.07, gates 0.5), also the gain over it,
task by task: in the accuracy on a task after it was learned (a[t, t]), and after the last task (a[T, t]).

Correlations, over the tasks, are between the first of these gains and two proxies of retention: the loss on anchors at
the end of the task's training (None for the first task, which has no anchors), and how much of the task is forgotten in
the end (max_i a[i, t] - a[T, t], undefined for the last task).
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.continual.diagnostics.drawing import blank, name_ticks
from benchmarks.continual.diagnostics.statistics import correlation, describe_runs
from benchmarks.continual.results import Finished, FinishedRun
from selector.report.plots import COLOURS, HATCHES, STROKES, finite

SOURCE = "Calibration-dynamics protocol"
PROXIES = {"anchor_loss": "the loss on anchors", "forgotten": "what is forgotten"}


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(method="paper")
    parser.add_argument("--fixed", default="fixed_calibration", help="the fixed method (default: %(default)s)")


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs = finished.chosen(options)
    trace = _means([traced(run) for run in runs])
    correlations = None
    if finished.has(options.fixed):
        trace |= _means([gains(run, finished.counterpart(run, options.fixed)) for run in runs])
        correlations = {proxy: correlation(trace["gain"], trace[proxy]) for proxy in PROXIES}
    return {
        "finding": _finding(runs[0].order, trace, correlations, options.fixed),
        **describe_runs(runs),
        "fixed": options.fixed if correlations else None,
        "tasks": runs[0].order,
        "trace": trace,
        "correlations": correlations,
    }


def traced(run: FinishedRun) -> dict[str, list[float]]:
    """One run's numbers after each of T tasks, by name, [T] each."""
    after_tasks = [calibration(run, number) for number in range(len(run.order))]
    a = run.accuracy
    return {
        "temperature": [row["temperature"] for row in after_tasks],
        "value_gate": [float(np.mean(row["value_gates"])) for row in after_tasks],
        "layer_bias": [float(np.mean(row["layer_bias"])) for row in after_tasks],
        "anchor_loss": [anchor_loss(report) for report in run.matrix["reports"]],
        "forgotten": [*(float(a[t:, t].max() - a[-1, t]) for t in range(len(a) - 1)), math.nan],
    }


def calibration(run: FinishedRun, number: int) -> Mapping[str, Any]:
    """That of the memory after task `number`: as the method reported it, or else from the memory, if that was kept."""
    reported = run.matrix["reports"][number].get("calibration")
    if reported is not None:
        return reported
    bundle = run.bundle(number)
    return {
        "temperature": float(bundle.temperature),
        "value_gates": bundle.value_gates.tolist(),
        "layer_bias": bundle.layer_bias.tolist(),
    }


def anchor_loss(report: Mapping[str, Any]) -> float:
    """The mean NLL of the last batch of anchors that a task's training has seen; NaN without anchors."""
    history = report.get("history") or [{}]
    loss = history[-1].get("anchors")
    return math.nan if loss is None else loss


def gains(run: FinishedRun, fixed: FinishedRun) -> dict[str, list[float]]:
    """Delta_t over the fixed calibration (paper, Eq. calibration_gain), [T]: when task t is learned, and in the end."""
    difference = run.accuracy - fixed.accuracy  # [T, T]
    return {"gain": difference.diagonal().tolist(), "gain_in_the_end": difference[-1].tolist()}


def _means(of_runs: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Over the runs, by name; NaN if any of them is."""
    return {name: np.mean([of_run[name] for of_run in of_runs], axis=0).tolist() for name in of_runs[0]}


def _finding(
    tasks: Sequence[str], trace: Mapping[str, Sequence[float]], correlations: dict[str, Any] | None, fixed: str
) -> str:
    labels = {"temperature": "the temperature", "value_gate": "the mean value gate"}
    ends = {label: (trace[name][0], trace[name][-1]) for name, label in labels.items()}
    moved = "; ".join(f"{label} goes from {first:.3g} to {last:.3g}" for label, (first, last) in ends.items())
    if correlations is None:
        return f"Over the stream {moved}; what that gains is not known, the run has no finished {fixed}."
    best = int(np.argmax(trace["gain"]))
    defined = [
        f"{PROXIES[proxy]} (Spearman {row['spearman']:+.2f})"
        for proxy, row in correlations.items()
        if row["spearman"] is not None
    ]
    related = f"; over the tasks it goes with {' and '.join(defined)}" if defined else ""
    return (
        f"Over the stream {moved}; over {fixed} a task gains {np.mean(trace['gain']):+.3f} on average when it is "
        f"learned, most {tasks[best]} ({trace['gain'][best]:+.3f}){related}."
    )


def plot(measured: dict[str, Any]) -> Figure:
    panels = 2 if measured["fixed"] else 1
    figure = blank(0.8 + 2 * panels)
    panel, *below = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    _draw_trace(panel, measured["trace"])
    for axes in below:
        _draw_gains(axes, measured["trace"])
        axes.set_ylabel(f"gain over {measured['fixed']}")
    name_ticks(panel, measured["tasks"])
    figure.legend(frameon=False, ncols=4, loc="outside upper left", fontsize=8)
    return figure


def _draw_trace(axes: Axes, trace: Mapping[str, Sequence[float | None]]) -> None:
    lines = ((axes, "temperature", "temperature (left)"), (axes.twinx(), "value_gate", "mean value gate (right)"))
    for (of, name, label), colour, stroke in zip(lines, COLOURS, STROKES, strict=False):
        values = finite(trace[name])
        of.plot(range(len(values)), values, stroke, marker="o", markersize=3, color=colour, label=label)
        of.set_ylabel(label.partition(" (")[0])
        of.grid(of is axes)


def _draw_gains(axes: Axes, trace: Mapping[str, Sequence[float | None]]) -> None:
    bars = (("gain", "gain when learned", -0.2), ("gain_in_the_end", "gain in the end", 0.2))
    for (name, label, offset), hatch in zip(bars, HATCHES, strict=False):
        gained = finite(trace[name])
        places = [place + offset for place in range(len(gained))]
        axes.bar(places, gained, 0.4, color=COLOURS[2], hatch=hatch, edgecolor="white", label=label)
    axes.axhline(0, color="black", linewidth=0.8)
