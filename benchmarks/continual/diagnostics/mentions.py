"""How often the expected answer occurs in what was answered, beside how often it is all that was: format and content.

A model that was never shown a task's format answers in whole sentences, and exact match counts none of them. Occurring
counts the expected words anywhere in the answer, so it is too kind where a question names its options: it bounds what
the model knows from above. After the last task, as means over the seeds.
"""

from __future__ import annotations

import re
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.chat import normalise_answer
from benchmarks.continual.diagnostics.drawing import blank, name_ticks
from benchmarks.continual.diagnostics.statistics import describe_runs
from benchmarks.continual.results import Finished

SOURCE = "design: what a frozen model knows before it is taught a format; not in the paper"


def add_arguments(parser: ArgumentParser) -> None:
    parser.set_defaults(method="no_memory")


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs = finished.chosen(options)
    exact: dict[str, list[bool]] = defaultdict(list)
    mentioned: dict[str, list[bool]] = defaultdict(list)
    for run in runs:
        for prediction in run.predictions().values():
            exact[prediction.task].append(prediction.right)
            mentioned[prediction.task].append(occurs(prediction.expected, prediction.answer))
    tasks = {name: {"exact": fmean(exact[name]), "mentioned": fmean(mentioned[name])} for name in exact}
    more = {name: row["mentioned"] - row["exact"] for name, row in tasks.items()}
    most = max(more, key=lambda name: more[name])
    return {
        "finding": f"The expected answer occurs more often than it is the whole answer by {max(more.values()):.1%} or "
        f"less of the questions of a task (most for {most}).",
        **describe_runs(runs),
        "tasks": tasks,
    }


def occurs(expected: str, answer: str) -> bool:
    """Whether the expected words stand in the answer, as whole words, in any case."""
    return re.search(rf"(?<!\w){re.escape(normalise_answer(expected))}(?!\w)", answer.lower()) is not None


def plot(measured: dict[str, Any]) -> Figure:
    figure = blank(3.2)
    axes = figure.add_subplot()
    for label, offset in (("exact", -0.2), ("mentioned", 0.2)):
        shares = [row[label] for row in measured["tasks"].values()]
        axes.bar([place + offset for place in range(len(shares))], shares, 0.4, label=label)
    name_ticks(axes, list(measured["tasks"]))
    axes.set(ylabel="share of questions", ylim=(0, 1))
    axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    return figure
