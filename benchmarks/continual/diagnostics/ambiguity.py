"""What memory gains by how clear the nearest entry is (retrieval ambiguity), within the task and across tasks.

g(x) = s_(1) - s_(2) is the gap between a question's two largest similarities with the memory's keys (paper, Eq.
sim_gap): the smaller, the more ambiguous. A question is cross-task where most of its k retrieved entries are of other
tasks. Gains are in exact match over the untouched model: -1, 0 or 1; their means are taken in bins of g that hold
equally many questions of all seeds. Questions whose relevance gate is closed retrieve nothing and are counted apart.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.continual.diagnostics.drawing import blank
from benchmarks.continual.diagnostics.retrieved import Judged, add_arguments, judge
from benchmarks.continual.metrics import standard_error
from benchmarks.continual.results import Finished
from inducekv_vllm.errors import ConfigError
from selector.report.plots import COLOURS, finite

__all__ = ["add_arguments", "measure", "plot"]

BINS = 8
POINTS = 1500  # that are drawn; means are over all
JITTER = 0.08  # of a drawn gain, so that points do not cover each other
GROUPS = {"own_task": "most entries of its own task", "cross_task": "most entries of other tasks"}


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs = finished.chosen(options)
    judged, closed = judge(finished, runs, options.top_k)
    clear = [one for one in judged if not math.isnan(one.retrieval.gap)]
    if not clear:
        raise ConfigError(
            f"no question of {runs[0].method} has two entries to retrieve: there is no ambiguity to measure"
        )
    bins = binned(clear)
    rng = np.random.default_rng(0)
    drawn = sorted(rng.choice(len(clear), min(POINTS, len(clear)), replace=False).tolist())
    return {
        "diagnostic": "ambiguity",
        "source": "When Does InduceKV Help the Most?",
        "says": _said(clear, bins, closed),
        "method": runs[0].method,
        "budget": runs[0].budget,
        "seeds": [run.seed for run in runs],
        "top_k": options.top_k,
        "questions": len(clear),
        "closed": closed,
        "bins": bins,
        "points": [[clear[row].retrieval.gap, clear[row].gain, clear[row].retrieval.is_cross_task] for row in drawn],
    }


def binned(judged: Sequence[Judged]) -> dict[str, list[dict[str, Any]]]:
    """Of each group in each bin: how many questions, their mean gap, and mean gain with its standard error.

    The bins are the same for both groups; where one has nothing in a bin, the bin is left out.
    """
    gaps = np.array([one.retrieval.gap for one in judged])
    edges = np.unique(np.quantile(gaps, np.linspace(0, 1, BINS + 1)[1:-1]))  # the inner ones
    number = np.digitize(gaps, edges)
    found: dict[str, list[dict[str, Any]]] = {}
    for group in GROUPS:
        found[group] = []
        for of_bin in range(len(edges) + 1):
            members = [
                one
                for one, at in zip(judged, number, strict=True)
                if at == of_bin and one.retrieval.is_cross_task == (group == "cross_task")
            ]
            if members:
                gains = [one.gain for one in members]
                found[group].append(
                    {
                        "bin": of_bin,
                        "questions": len(members),
                        "gap": float(np.mean([one.retrieval.gap for one in members])),
                        "gain": float(np.mean(gains)),
                        "standard_error": standard_error(gains),
                    }
                )
    return found


def _said(judged: Sequence[Judged], bins: dict[str, list[dict[str, Any]]], closed: int) -> str:
    last = max(one["bin"] for group in bins.values() for one in group)
    ends = []
    for number in (0, last):
        of_bin = [one for group in bins.values() for one in group if one["bin"] == number]
        ends.append(sum(one["gain"] * one["questions"] for one in of_bin) / sum(one["questions"] for one in of_bin))
    cross = [one.gain for one in judged if one.retrieval.is_cross_task]
    gate = f"; the gate was closed for {closed} others" if closed else ""
    crossing = f", where the gain is {np.mean(cross):+.3f}" if cross else ""
    return (
        f"The mean gain over no memory is {ends[0]:+.3f} where retrieval is most ambiguous and {ends[1]:+.3f} where it "
        f"is clearest; {len(cross) / len(judged):.1%} of {len(judged)} answers retrieve mostly from other tasks"
        f"{crossing}{gate}."
    )


def plot(found: dict[str, Any]) -> Figure:
    figure = blank(3.6)
    axes = figure.add_subplot()
    rng = np.random.default_rng(0)
    for (group, label), colour, marker in zip(GROUPS.items(), COLOURS, "ox", strict=False):
        points = np.array([point[:2] for point in found["points"] if point[2] == (group == "cross_task")])
        if len(points):
            heights = points[:, 1] + rng.uniform(-JITTER, JITTER, len(points))
            axes.scatter(points[:, 0], heights, s=6, color=colour, marker=marker, alpha=0.3, linewidths=0.6)
        line = found["bins"][group]
        if line:
            gaps, gains = [one["gap"] for one in line], [one["gain"] for one in line]
            errors = np.nan_to_num(finite([one["standard_error"] for one in line]))
            axes.errorbar(gaps, gains, errors, color=colour, marker=marker, capsize=2, linewidth=1.6, label=label)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="g(x): gap between the two largest similarities", ylabel="gain over no memory", yticks=[-1, 0, 1])
    axes.legend(frameon=False, ncols=2, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1))
    return figure
