"""How often the relevance gate opens, and for which task, on test questions that nothing was fitted to.

For the memory after the last task, as means over the seeds: of each task's questions the share that gets memory, and
the share that is sent to the task's own entries; of the base's, the share that gets memory.
"""

from __future__ import annotations

import statistics
from argparse import ArgumentParser, Namespace
from typing import Any

from matplotlib.figure import Figure

from benchmarks.continual.diagnostics.drawing import blank
from benchmarks.continual.diagnostics.statistics import describe_runs
from benchmarks.continual.results import Finished
from inducekv_vllm.errors import ConfigError
from selector.backbone.bundled_model import openings
from selector.report.plots import COLOURS, HATCHES

SOURCE = "design: the relevance gate of the refined recipe; not in the paper"


def add_arguments(parser: ArgumentParser) -> None:
    pass


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs = finished.chosen(options)
    bundles = [run.bundle() for run in runs]
    if any(bundle.gate is None for bundle in bundles):
        raise ConfigError(f"the memory of {runs[0].method} has no relevance gate")
    suite, opened = finished.suite, {}
    for task in (*suite.tasks, suite.base):
        keys = finished.query_keys(task)
        shares = [openings(bundle, task.name, keys) for bundle in bundles]
        opened[task.name] = {name: round(statistics.mean(share[name] for share in shares), 4) for name in shares[0]}
    opened[suite.base.name].pop("own_task")
    worst = min(suite.tasks, key=lambda task: opened[task.name]["own_task"])
    return {
        "finding": f"The gate sends {opened[worst.name]['own_task']:.1%} or more of each task's questions to the "
        f"task's own entries (least for {worst.name}), and opens for {opened[suite.base.name]['opened']:.1%} of base "
        "questions.",
        **describe_runs(runs),
        "opened": opened,
    }


def plot(measured: dict[str, Any]) -> Figure:
    figure = blank(3.2)
    axes = figure.add_subplot()
    bars = (("opened", "gets memory", -0.2), ("own_task", "gets its own task's entries", 0.2))
    for (name, label, offset), colour, hatch in zip(bars, COLOURS, HATCHES, strict=False):
        places = [place + offset for place in range(len(measured["opened"]))]
        shares = [share.get(name, 0.0) for share in measured["opened"].values()]
        axes.bar(places, shares, 0.4, color=colour, hatch=hatch, edgecolor="white", label=label)
    axes.set_xticks(range(len(measured["opened"])), list(measured["opened"]))
    axes.set(ylabel="share of questions", ylim=(0, 1))
    axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    return figure
