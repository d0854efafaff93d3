"""What is lost when the relaxed selection becomes B entries: weight, retrieval, likelihood.

    python -m benchmarks.continual.diagnostics rounding --out DIR --method paper [--budget B]

After each task, over seeds: the share of the relaxed weights w that Top-B keeps; the Jensen-Shannon divergence (nats)
between retrieval over the relaxed pool and over the deployed memory; and what the NLL of validation answers is with
the one and with the other. The selector measures them at each update, where the relaxed solution still exists
(`selector.update.inputs`); here they are read from the runs, and put together.

Sources: the paper's sections "Relaxed-to-Discrete Rounding Gap" and "Scalable Shortlist Selection and Train-Test
Retrieval Mismatch".
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.continual.diagnostics.drawing import blank
from benchmarks.continual.diagnostics.spread import spread
from benchmarks.continual.results import Finished, FinishedRun
from inducekv_vllm.errors import ConfigError
from selector.report.plots import COLOURS

SOURCE = 'paper, "Relaxed-to-Discrete Rounding Gap" and "Train-Test Retrieval Mismatch"'
MEASURES = {
    "mass_captured": "share of the weight kept",
    "retrieval_divergence_nats": "retrieval divergence, nats",
    "nll_gap": "NLL, deployed less relaxed",
}


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(method="paper")


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    """
    Raises:
        ConfigError: there is no such run, or its method does not round.
    """
    runs = finished.chosen(options)
    tasks = [by_task(run) for run in runs]  # [seeds][T]
    rows = [
        {"task": task, **{name: spread_of(values, name) for name in (*MEASURES, "relaxed_nll", "deployed_nll")}}
        for task, values in zip(runs[0].order, zip(*tasks, strict=True), strict=True)
    ]
    overall = {name: spread_of([one for run in tasks for one in run], name) for name in MEASURES}
    return {
        "diagnostic": "rounding",
        "source": SOURCE,
        "says": _says(runs[0], overall),
        "method": runs[0].method,
        "budget": runs[0].budget,
        "seeds": [run.seed for run in runs],
        "tasks": rows,
        "overall": overall,
        "collapsed": sum(one["collapsed"] for run in tasks for one in run),
        "updates": sum(map(len, tasks)),
    }


def by_task(run: FinishedRun) -> list[dict[str, Any]]:
    """What each update of a run reported, [T]; NLLs are None where it had no validation examples."""
    found = []
    for task, report in zip(run.order, run.matrix["reports"], strict=True):
        if not report.get("rounding"):
            raise ConfigError(
                f"{run.folder}: the update of {task} reports no rounding: {run.method} does not select by relaxed "
                "weights; the method paper and its ablations do"
            )
        nll = report.get("validation_nll") or {}
        found.append(
            {
                **{
                    name: report["rounding"][name]
                    for name in ("mass_captured", "retrieval_divergence_nats", "collapsed")
                },
                "nll_gap": nll.get("rounding_gap"),
                "relaxed_nll": nll.get("relaxed"),
                "deployed_nll": nll.get("deployed"),
            }
        )
    return found


def spread_of(values: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any] | None:
    """Over those that have it, None where none has."""
    known = [one[name] for one in values if one[name] is not None]
    return spread(known) if known else None


def plot(found: dict[str, Any]) -> Figure:
    figure = blank(3.2)
    names = [row["task"] for row in found["tasks"]]
    for number, (measure_, label) in enumerate(MEASURES.items()):
        axes = figure.add_subplot(1, len(MEASURES), number + 1)
        for place, row in enumerate(found["tasks"]):
            if row[measure_] is not None:
                height, error = row[measure_]["mean"], row[measure_]["standard_deviation"]
                axes.bar(place, height, yerr=error, color=COLOURS[number], width=0.7, capsize=3)
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
        axes.set(ylabel=label)
    figure.suptitle(f"{found['method']}, {found['budget']} entries: mean and standard deviation over seeds", fontsize=9)
    return figure


def _says(run: FinishedRun, overall: Mapping[str, Any]) -> str:
    mass, divergence, gap = (overall[name] for name in MEASURES)
    said = (
        f"The {run.budget} entries of {run.method} keep {mass['mean']:.1%} of the relaxed weight; retrieval changes by "
        f"{divergence['mean']:.3f} nats (Jensen-Shannon, at most {math.log(2):.3f})"
    )
    return f"{said}, the NLL of validation answers by {gap['mean']:+.4f}." if gap else f"{said}."
