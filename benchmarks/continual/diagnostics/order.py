"""How far the final score depends on the order in which the tasks are learned.

    python -m benchmarks.continual.diagnostics order --out DIR --also DIR ... [--score AP]

Each folder is a finished `python -m benchmarks.continual run` that differs from the others in `--order` alone. One
dot is one run (a seed of an order); stars are the suite's own order, if a folder has it. Of the runs of a method
and budget: mean and standard deviation; and, because seeds are mixed in, the standard deviation between the means
of the orders beside that within an order, over seeds.
"""

from __future__ import annotations

import math
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.continual.comparison import UNTOUCHED
from benchmarks.continual.diagnostics.drawing import blank, name_ticks
from benchmarks.continual.diagnostics.statistics import require_same, spread
from benchmarks.continual.results import Finished, FinishedRun
from inducekv_vllm.errors import ConfigError
from selector.report.plots import COLOURS

SOURCE = 'paper, "Effect of Task Order"'


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--also", nargs="+", type=Path, default=[], metavar="DIR", help="the runs of other orders")
    parser.add_argument("--score", default="AP", help="which of the runs' metrics (default AP)")


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    """All methods that every folder has finished; the others are named in "left_out"."""
    folders = [finished, *(Finished.read(folder, options.model, options.data) for folder in options.also)]
    require_different_orders(folders)
    orders = [list(folder.configuration["order"]) for folder in folders]
    of_suite = [task.name for task in finished.whole_suite.tasks if task.name in orders[0]]
    default = orders.index(of_suite) if of_suite in orders else None
    by_folder = [grouped(folder.complete) for folder in folders]
    in_all = [key for key in by_folder[0] if all(key in groups for groups in by_folder)]
    if not in_all:
        raise ConfigError("no method and budget is finished in all folders")
    rows = []
    for key in in_all:
        groups = [groups[key] for groups in by_folder]
        first, *others = [run for group in groups for run in group]
        for run in others:
            which = f"{first.folder} and {run.folder}"
            require_same(first.matrix["settings"], run.matrix["settings"], which, but="order")
        scores = [{run.seed: score_of(run, options.score) for run in group} for group in groups]
        rows.append({"method": key[0], "budget": key[1]} | distribution(scores, default))
    left_out = {key for groups in by_folder for key in groups} - set(in_all)
    return {
        "finding": _finding(rows, options.score, len(orders)),
        "score": options.score,
        "orders": orders,
        "default_order": default,
        "methods": rows,
        "left_out": [f"{method} with budget {budget}: not in every folder" for method, budget in sorted(left_out)],
    }


def grouped(runs: Sequence[FinishedRun]) -> dict[tuple[str, int], list[FinishedRun]]:
    """The runs by method and budget, in their own order."""
    groups: dict[tuple[str, int], list[FinishedRun]] = {}
    for run in runs:
        groups.setdefault((run.method, run.budget), []).append(run)
    return groups


def score_of(run: FinishedRun, metric: str) -> float:
    """Raises ConfigError: the run has no such metric."""
    if metric not in (metrics := run.matrix["metrics"]):
        raise ConfigError(f"{run.folder}: there is no metric {metric!r}, there are: {', '.join(metrics)}")
    return metrics[metric]


def require_different_orders(folders: Sequence[Finished]) -> None:
    """Raises ConfigError: names what else differs, or that the order does not."""
    first = folders[0]
    by_order: dict[tuple[str, ...], Path] = {}
    for folder in folders:
        order = tuple(folder.configuration["order"])
        if order in by_order:
            raise ConfigError(f"{by_order[order]} and {folder.out} have the same order, {', '.join(order)}")
        by_order[order] = folder.out
        if sorted(order) != sorted(first.configuration["order"]):
            raise ConfigError(f"{first.out} and {folder.out} are not orders of the same tasks: {', '.join(order)}")
        require_same(first.configuration, folder.configuration, f"{first.out} and {folder.out}", but="order")
    if len(by_order) < 2:
        raise ConfigError("order sensitivity needs at least two orders, found one: give others with --also")


def distribution(scores: Sequence[Mapping[int, float]], default: int | None) -> dict[str, Any]:
    """Of one method: of each order, the score of each seed; `default` is the row of the suite's own order, if any."""
    runs = [{"order": row, "seed": seed, "score": x} for row, of in enumerate(scores) for seed, x in of.items()]
    whole = spread([run["score"] for run in runs])
    within = [statistics.variance(of.values()) for of in scores if len(of) > 1]
    return {
        "runs": runs,
        "mean": whole["mean"],
        "standard_deviation": whole["standard_deviation"],
        "between_orders": statistics.stdev(statistics.mean(of.values()) for of in scores),
        "within_orders": math.sqrt(statistics.mean(within)) if within else None,
        "default": None if default is None else statistics.mean(scores[default].values()),
    }


def _finding(rows: Sequence[Mapping[str, Any]], score: str, orders: int) -> str:
    values = [f"{r['method']} ({r['budget']}) {r['mean']:.3f} ± {r['standard_deviation']:.3f}" for r in rows]
    summary = f"Over {orders} orders of the tasks, {score} (mean ± standard deviation of runs) is: {'; '.join(values)}"
    # No order matters to a model that learns nothing.
    learning = [row for row in rows if row["method"] != UNTOUCHED]
    if len(learning) < 2:
        return f"{summary}."
    least = min(learning, key=lambda row: row["standard_deviation"])
    return f"{summary}; the order matters least to {least['method']} ({least['budget']})."


def plot(measured: dict[str, Any]) -> Figure:
    figure = blank(4.2)
    axes = figure.add_subplot()
    for place, row in enumerate(measured["methods"]):
        scores = [run["score"] for run in row["runs"]]
        colour = COLOURS[place % len(COLOURS)]
        if len(set(scores)) > 1:  # a violin needs some width
            for body in axes.violinplot(scores, positions=[place], widths=0.8, showextrema=False)["bodies"]:
                body.set(facecolor=colour, alpha=0.25)
        axes.plot([place] * len(scores), scores, "o", color=colour, markersize=4, alpha=0.7)
        axes.plot([place], [row["mean"]], "_", color="black", markersize=16)
        if row["default"] is not None:
            axes.plot([place], [row["default"]], "*", color="black", markersize=11)
    name_ticks(axes, [f"{row['method']}, {row['budget']}" for row in measured["methods"]])
    axes.set(ylabel=f"{measured['score']} after the last task")
    axes.set_title("One dot a run; bar: mean, star: the suite's own order", fontsize=9)
    return figure
