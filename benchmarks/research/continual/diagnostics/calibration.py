"""What the calibration becomes over the stream, and what it gains over a fixed one.

After each task: the temperature tau_t, the mean value gate and the mean layer bias of the memory, as means over the
seeds. If the run has the method `fixed_calibration` (tau 0.07, gates 0.5), also the gain over it, task by task: in the
accuracy on a task after it was learned (a[t, t]), and after the last task (a[T, t]).

Correlations, over the tasks, are between the first of these gains and two proxies of retention: the loss on anchors at
the end of the task's training (None for the first task, which has no anchors), and how much of the task is forgotten in
the end (max_i a[i, t] - a[T, t], undefined for the last task).
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import pearsonr, spearmanr

from benchmarks.research.continual.results import Finished, FinishedRun, describe_runs
from benchmarks.research.drawing import COLOURS, HATCHES, blank, finite, name_ticks

FIXED = "fixed_calibration"
PROXIES = ("anchor_loss", "forgotten")
MIN_PAIRS = 3  # for a correlation


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs = finished.chosen(options)
    trace = _means([traced(run) for run in runs])
    ends = [
        f"{name.replace('_', ' ')} {trace[name][0]:.3g} to {trace[name][-1]:.3g}"
        for name in ("temperature", "value_gate")
    ]
    sentence, correlations = f"Over the stream: {', '.join(ends)}", None
    if finished.has(FIXED):
        trace |= _means([gains(run, finished.counterpart(run, FIXED)) for run in runs])
        correlations = {proxy: correlation(trace["gain"], trace[proxy]) for proxy in PROXIES}
        sentence += f"; mean gain over {FIXED} when a task is learned: {np.mean(trace['gain']):+.3f}"
    return {
        "finding": f"{sentence}.",
        **describe_runs(runs),
        "fixed": FIXED if correlations else None,
        "tasks": runs[0].order,
        "trace": trace,
        "correlations": correlations,
    }


def traced(run: FinishedRun) -> dict[str, list[float]]:
    """One run's numbers after each of T tasks, by name, [T] each."""
    after_tasks = [calibration(run, number) for number in range(len(run.order))]
    losses = [(report.get("history") or [{}])[-1].get("anchors") for report in run.matrix["reports"]]
    a = run.accuracy
    return {
        "temperature": [row["temperature"] for row in after_tasks],
        "value_gate": [float(np.mean(row["value_gates"])) for row in after_tasks],
        "layer_bias": [float(np.mean(row["layer_bias"])) for row in after_tasks],
        # The mean NLL of the last batch of anchors that a task's training has seen.
        "anchor_loss": [math.nan if loss is None else loss for loss in losses],
        "forgotten": [*(float(a[t:, t].max() - a[-1, t]) for t in range(len(a) - 1)), math.nan],
    }


def calibration(run: FinishedRun, number: int) -> Mapping[str, Any]:
    """That of the memory after task `number`: as the method reported it, or else from the memory, if that was kept."""
    if (reported := run.matrix["reports"][number].get("calibration")) is not None:
        return reported
    bundle = run.bundle(number)
    gates, bias = bundle.value_gates.tolist(), bundle.layer_bias.tolist()
    return {"temperature": float(bundle.temperature), "value_gates": gates, "layer_bias": bias}


def gains(run: FinishedRun, fixed: FinishedRun) -> dict[str, list[float]]:
    """Delta_t over the fixed calibration (paper, Eq. calibration_gain), [T]: when task t is learned, and in the end."""
    difference = run.accuracy - fixed.accuracy  # [T, T]
    return {"gain": difference.diagonal().tolist(), "gain_in_the_end": difference[-1].tolist()}


def correlation(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    """Pearson's r and Spearman's rho of the finite pairs; None for fewer than three, or if x or y is constant."""
    pairs = np.array([pair for pair in zip(x, y, strict=True) if all(map(math.isfinite, pair))])
    result: dict[str, Any] = {"pairs": len(pairs), "pearson": None, "spearman": None}
    if len(pairs) >= MIN_PAIRS and np.ptp(pairs, axis=0).all():
        result["pearson"], result["spearman"] = (float(f(*pairs.T).statistic) for f in (pearsonr, spearmanr))
    return result


def _means(of_runs: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Over the runs, by name; NaN if any of them is."""
    return {name: np.mean([of_run[name] for of_run in of_runs], axis=0).tolist() for name in of_runs[0]}


def plot(measured: dict[str, Any]) -> Figure:
    trace, panels = measured["trace"], 2 if measured["fixed"] else 1
    figure = blank(0.8 + 2 * panels)
    panel, *below = figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0]
    for axes, name, colour in ((panel, "temperature", COLOURS[0]), (panel.twinx(), "value_gate", COLOURS[1])):
        values = finite(trace[name])
        axes.plot(range(len(values)), values, marker="o", markersize=3, color=colour)
        axes.set_ylabel(name.replace("_", " "), color=colour)
        axes.grid(axes is panel)
    for axes in below:
        for name, offset, hatch in (("gain", -0.2, HATCHES[0]), ("gain_in_the_end", 0.2, HATCHES[1])):
            gained = finite(trace[name])
            places = [place + offset for place in range(len(gained))]
            label = name.replace("_", " ")
            axes.bar(places, gained, 0.4, color=COLOURS[2], hatch=hatch, edgecolor="white", label=label)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_ylabel(f"over {measured['fixed']}")
        axes.legend(frameon=False, fontsize=8)
    name_ticks(panel, measured["tasks"])
    return figure
