"""What is lost when the relaxed selection becomes B entries: weight, retrieval, likelihood.

After each task, over seeds: the share of the relaxed weights w that Top-B keeps; the Jensen-Shannon divergence (nats)
between retrieval over the relaxed pool and over the bundle; and the NLL of validation answers with each of the two. The
selector measures them at each update, while the relaxed solution still exists; they are read from the runs here.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.continual.diagnostics.drawing import blank, name_ticks
from benchmarks.continual.diagnostics.statistics import describe_runs, spread
from benchmarks.continual.results import Finished, FinishedRun
from inducekv_vllm.errors import ConfigError
from selector.report.plots import COLOURS

SOURCE = 'paper, "Relaxed-to-Discrete Rounding Gap" and "Train-Test Retrieval Mismatch"'
MEASURES = {
    "mass_captured": "share of the weight kept",
    "retrieval_divergence_nats": "retrieval divergence, nats",
    "nll_gap": "NLL, bundle less relaxed",
}
KEPT = ("mass_captured", "retrieval_divergence_nats", "collapsed")  # of what an update reports


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(method="paper")


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs = finished.chosen(options)
    tasks = [by_task(run) for run in runs]  # [seeds][T]
    rows = [
        {"task": task, **{name: spread_of(values, name) for name in (*MEASURES, "relaxed_nll", "deployed_nll")}}
        for task, values in zip(runs[0].order, zip(*tasks, strict=True), strict=True)
    ]
    updates = [update for run in tasks for update in run]
    overall = {name: spread_of(updates, name) for name in MEASURES}
    return {
        "finding": _finding(runs[0], overall),
        **describe_runs(runs),
        "tasks": rows,
        "overall": overall,
        "collapsed": sum(update["collapsed"] for update in updates),
        "updates": len(updates),
    }


def by_task(run: FinishedRun) -> list[dict[str, Any]]:
    """What each update of a run reported, [T]; NLLs are None without validation examples."""
    updates = []
    for task, report in zip(run.order, run.matrix["reports"], strict=True):
        if not report.get("rounding"):
            raise ConfigError(
                f"{run.folder}: the update of {task} reports no rounding: {run.method} does not select by relaxed "
                "weights; the method paper and its ablations do"
            )
        nll = report.get("validation_nll") or {}
        names = {"nll_gap": "rounding_gap", "relaxed_nll": "relaxed", "deployed_nll": "deployed"}
        rounding = {name: report["rounding"][name] for name in KEPT}
        updates.append(rounding | {name: nll.get(reported) for name, reported in names.items()})
    return updates


def spread_of(values: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    """Over those that have the value, None if none has."""
    numbers = [value[name] for value in values if value[name] is not None]
    return spread(numbers) if numbers else None


def plot(measured: dict[str, Any]) -> Figure:
    figure = blank(3.2)
    names = [row["task"] for row in measured["tasks"]]
    for number, (measure_, label) in enumerate(MEASURES.items()):
        axes = figure.add_subplot(1, len(MEASURES), number + 1)
        for place, row in enumerate(measured["tasks"]):
            if row[measure_] is not None:
                height, error = row[measure_]["mean"], row[measure_]["standard_deviation"]
                axes.bar(place, height, yerr=error, color=COLOURS[number], width=0.7, capsize=3)
        name_ticks(axes, names)
        axes.set(ylabel=label)
    subject = f"{measured['method']}, {measured['budget']} entries"
    figure.suptitle(f"{subject}: mean and standard deviation over seeds", fontsize=9)
    return figure


def _finding(run: FinishedRun, overall: Mapping[str, Any]) -> str:
    mass, divergence, gap = (overall[name] for name in MEASURES)
    summary = (
        f"The {run.budget} entries of {run.method} keep {mass['mean']:.1%} of the relaxed weight; retrieval changes by "
        f"{divergence['mean']:.3f} nats (Jensen-Shannon, at most {math.log(2):.3f})"
    )
    return f"{summary}, the NLL of validation answers by {gap['mean']:+.4f}." if gap else f"{summary}."
