"""What memory gains by how much of the retrieved is of the question's own task (hit rate).

hit_k(x) is the share of the k entries nearest to a question that were made from its own task (paper, Eq. hit_rate), in
five bins. For each: the mean gain over the untouched model and both accuracies, with standard errors over all questions
and seeds of the bin. Questions whose relevance gate is closed retrieve nothing and are counted apart.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.continual.diagnostics.drawing import blank
from benchmarks.continual.diagnostics.retrieved import Judged, add_arguments, judge
from benchmarks.continual.metrics import standard_error
from benchmarks.continual.results import Finished
from selector.report.plots import COLOURS, finite

__all__ = ["add_arguments", "measure", "plot"]

BINS = 5


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs = finished.chosen(options)
    judged, closed = judge(finished, runs, options.top_k)
    bins = binned(judged)
    return {
        "diagnostic": "hit_rate",
        "source": "Retrieval Quality Diagnosis",
        "says": _said(bins, closed),
        "method": runs[0].method,
        "budget": runs[0].budget,
        "seeds": [run.seed for run in runs],
        "top_k": options.top_k,
        "bins": bins,
        "closed": closed,
    }


def binned(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """[0, 0.2), [0.2, 0.4) ... [0.8, 1] of the hit rate; means are None where a bin is empty."""
    members: list[list[Judged]] = [[] for _ in range(BINS)]
    for one in judged:  # in whole numbers: 3 of 5 is in [0.6, 0.8) and not below it
        members[min(BINS - 1, BINS * one.retrieval.hits // one.retrieval.retrieved)].append(one)
    return [
        {
            "from": number / BINS,
            "to": (number + 1) / BINS,
            "questions": len(inside),
            "gain": _mean([one.gain for one in inside]),
            "accuracy": _mean([one.right for one in inside]),
            "accuracy_without": _mean([one.right_without for one in inside]),
        }
        for number, inside in enumerate(members)
    ]


def _mean(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"mean": None, "standard_error": None}
    return {"mean": float(np.mean(values)), "standard_error": standard_error(values)}


def _said(bins: Sequence[dict[str, Any]], closed: int) -> str:
    used = [one for one in bins if one["questions"]]
    parts = [
        f"{one['gain']['mean']:+.3f} where {one['from']:.0%} to {one['to']:.0%} of the retrieved entries are of the "
        f"question's own task ({one['questions']} questions)"
        for one in (used if len(used) < 3 else (used[0], used[-1]))
    ]
    gate = f"; the gate was closed for {closed} others" if closed else ""
    return f"The mean gain over no memory is {' and '.join(parts) or 'not known: no question got memory'}{gate}."


def plot(found: dict[str, Any]) -> Figure:
    figure = blank(3.4)
    gains = figure.add_subplot()
    accuracies = gains.twinx()
    places = [(one["from"] + one["to"]) / 2 for one in found["bins"]]
    curves = (
        (gains, "gain", "mean gain (left)", "o-"),
        (accuracies, "accuracy", "accuracy with memory (right)", "s-"),
        (accuracies, "accuracy_without", "accuracy without (right)", "s--"),
    )
    for (axes, name, label, form), colour in zip(curves, COLOURS, strict=False):
        _with_band(axes, places, [one[name] for one in found["bins"]], form, colour, label)
    counted = [f"{one['from']:.1f}–{one['to']:.1f}\nn = {one['questions']}" for one in found["bins"]]
    gains.set_xticks(places, counted)
    gains.axhline(0, color="black", linewidth=0.8)
    gains.set(xlabel=f"hit rate of the top {found['top_k']}", ylabel="mean gain over no memory")
    accuracies.set(ylabel="accuracy", ylim=(-0.02, 1.02))
    accuracies.grid(False)
    figure.legend(frameon=False, ncols=3, loc="outside upper left", fontsize=8)
    return figure


def _with_band(
    axes: Axes,
    places: Sequence[float],
    values: Sequence[dict[str, Any]],
    form: str,
    colour: str,
    label: str,
) -> None:
    """A line through the means, and a band of one standard error on both sides."""
    means = np.array(finite([one["mean"] for one in values]))
    errors = np.nan_to_num(finite([one["standard_error"] for one in values]))
    axes.plot(places, means, form, color=colour, label=label)
    axes.fill_between(places, means - errors, means + errors, color=colour, alpha=0.2, linewidth=0)
