"""How far the final score depends on the order in which the tasks arrive.

    python -m benchmarks.continual.diagnostics order --out DIR --also DIR ... [--score AP]

Each folder is a finished `python -m benchmarks.continual run` that differs from the others in `--order` alone. One dot
is one run (a seed of an order); stars are the suite's own order, where a folder has it. Of the runs of a method and
budget: mean and standard deviation, and, because seeds are mixed in, the standard deviation between the means of the
orders beside that within an order, over seeds.

Source: the paper's section "Effect of Task Order".
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
from benchmarks.continual.diagnostics.drawing import blank
from benchmarks.continual.diagnostics.groups import grouped
from benchmarks.continual.diagnostics.sameness import require_same
from benchmarks.continual.diagnostics.spread import plus_minus, spread
from benchmarks.continual.results import Finished, FinishedRun
from inducekv_vllm.errors import ConfigError
from selector.report.plots import COLOURS

SOURCE = 'paper, "Effect of Task Order"'
ONLY_DIFFERENCE = "order"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--also", nargs="+", type=Path, default=[], metavar="DIR", help="the runs of other orders")
    parser.add_argument("--score", default="AP", help="which of the runs' metrics (default AP)")


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    """All methods that every folder has finished; the others are named in "left_out".

    Raises:
        ConfigError: there is one order only, an order comes twice, folders or settings differ in more than the order,
            no method is in all folders, or there is no such score.
    """
    folders = [finished, *(Finished.read(folder, options.model, options.data) for folder in options.also)]
    require_other_orders(folders)
    usual = [task.name for task in finished.whole_suite.tasks]
    return compare_orders(
        folders, [name for name in usual if name in set(folders[0].configuration["order"])], options.score
    )


def require_other_orders(folders: Sequence[Finished]) -> None:
    """
    Raises:
        ConfigError: naming what differs, or that nothing does.
    """
    first = folders[0]
    orders: dict[tuple[str, ...], Path] = {}
    for one in folders:
        order = tuple(one.configuration[ONLY_DIFFERENCE])
        if order in orders:
            raise ConfigError(f"{orders[order]} and {one.out} have the same order, {', '.join(order)}")
        orders[order] = one.out
        if sorted(order) != sorted(first.configuration[ONLY_DIFFERENCE]):
            raise ConfigError(f"{first.out} and {one.out} are not orders of the same tasks: {', '.join(order)}")
        require_same(first.configuration, one.configuration, f"{first.out} and {one.out}", but=ONLY_DIFFERENCE)
    if len(orders) < 2:
        raise ConfigError("order sensitivity needs at least two orders, found one: give others with --also")


def compare_orders(folders: Sequence[Finished], usual: Sequence[str], score: str) -> dict[str, Any]:
    """
    Args:
        usual: the tasks in the suite's own order.
    """
    orders = [list(one.configuration[ONLY_DIFFERENCE]) for one in folders]
    default = orders.index(list(usual)) if list(usual) in orders else None
    by_folder = [grouped(one.complete) for one in folders]
    everywhere = [key for key in by_folder[0] if all(key in groups for groups in by_folder)]
    if not everywhere:
        raise ConfigError("no method and budget is finished in all folders")
    rows = []
    for method, budget in everywhere:
        groups = [groups[method, budget] for groups in by_folder]
        _require_same_settings([run for group in groups for run in group])
        rows.append(
            {"method": method, "budget": budget} | distribution([_scores(group, score) for group in groups], default)
        )
    elsewhere = {key for groups in by_folder for key in groups} - set(everywhere)
    return {
        "diagnostic": "order",
        "source": SOURCE,
        "says": _says(rows, score, len(orders)),
        "score": score,
        "orders": orders,
        "default_order": default,
        "methods": rows,
        "left_out": [f"{method} with budget {budget}: not in every folder" for method, budget in sorted(elsewhere)],
    }


def distribution(scores: Sequence[Mapping[int, float]], default: int | None) -> dict[str, Any]:
    """Of one method.

    Args:
        scores: of each order, the score of each seed.
        default: the row of the suite's own order, None where it is not among them.
    """
    runs = [{"order": row, "seed": seed, "score": x} for row, of in enumerate(scores) for seed, x in of.items()]
    found = spread([run["score"] for run in runs])
    within = [statistics.variance(of.values()) for of in scores if len(of) > 1]
    return {
        "runs": runs,
        "mean": found["mean"],
        "standard_deviation": found["standard_deviation"],
        "between_orders": statistics.stdev(statistics.mean(of.values()) for of in scores),
        "within_orders": math.sqrt(statistics.mean(within)) if within else None,
        "default": None if default is None else statistics.mean(scores[default].values()),
    }


def plot(found: dict[str, Any]) -> Figure:
    figure = blank(4.2)
    axes = figure.add_subplot()
    for place, row in enumerate(found["methods"]):
        scores = [run["score"] for run in row["runs"]]
        colour = COLOURS[place % len(COLOURS)]
        if len(set(scores)) > 1:  # a violin needs some width
            for body in axes.violinplot(scores, positions=[place], widths=0.8, showextrema=False)["bodies"]:
                body.set(facecolor=colour, alpha=0.25)
        axes.plot([place] * len(scores), scores, "o", color=colour, markersize=4, alpha=0.7)
        axes.plot([place], [row["mean"]], "_", color="black", markersize=16)
        if row["default"] is not None:
            axes.plot([place], [row["default"]], "*", color="black", markersize=11)
    names = [f"{row['method']}, {row['budget']}" for row in found["methods"]]
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", rotation_mode="anchor")
    axes.set(ylabel=f"{found['score']} after the last task")
    axes.set_title("One dot a run; bar: mean, star: the suite's own order", fontsize=9)
    return figure


def _scores(runs: Sequence[FinishedRun], score: str) -> dict[int, float]:
    for run in runs:
        if score not in run.matrix["metrics"]:
            raise ConfigError(
                f"{run.folder}: there is no metric {score!r}, there are: {', '.join(run.matrix['metrics'])}"
            )
    return {run.seed: run.matrix["metrics"][score] for run in runs}


def _require_same_settings(runs: Sequence[FinishedRun]) -> None:
    for run in runs:
        which = f"{runs[0].folder} and {run.folder}"
        require_same(runs[0].matrix["settings"], run.matrix["settings"], which, but=ONLY_DIFFERENCE)


def _says(rows: Sequence[Mapping[str, Any]], score: str, orders: int) -> str:
    told = [f"{r['method']} ({r['budget']}) {plus_minus(r['mean'], r['standard_deviation'])}" for r in rows]
    said = f"Over {orders} orders of the tasks, {score} (mean ± standard deviation of runs) is: {'; '.join(told)}"
    learning = [row for row in rows if row["method"] != UNTOUCHED]  # to a model that learns nothing no order matters
    if len(learning) < 2:
        return f"{said}."
    least = min(learning, key=lambda row: row["standard_deviation"])
    return f"{said}; the order matters least to {least['method']} ({least['budget']})."
