"""Finished runs that differ in one thing: the order of the tasks, or one setting at a time."""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.research.continual.metrics import standard_error
from benchmarks.research.continual.results import WHERE, Finished, FinishedRun
from benchmarks.research.drawing import COLOURS, blank, name_ticks
from inducekv_vllm.errors import ConfigError

SCORE = "AP"
SCORES = (SCORE, "AF", "base_final")


def measure_order(finished: Finished, options: Namespace) -> dict[str, Any]:
    """AP of all methods that every folder has finished; the folders differ in the order of the tasks alone.

    Of the runs of a method and budget: mean and standard deviation; and, because seeds are mixed in, the standard
    deviation between the means of the orders beside that within an order, over seeds.
    """
    folders = [finished, *(Finished.read(folder, options.model, options.data) for folder in options.also)]
    require_different_orders(folders)
    orders = [list(folder.configuration["order"]) for folder in folders]
    of_suite = [task.name for task in finished.whole_suite.tasks if task.name in orders[0]]
    default = orders.index(of_suite) if of_suite in orders else None
    by_folder: list[dict[tuple[str, int], list[FinishedRun]]] = []
    for folder in folders:
        groups: dict[tuple[str, int], list[FinishedRun]] = {}
        for run in folder.complete:
            groups.setdefault((run.method, run.budget), []).append(run)
        by_folder.append(groups)
    in_all = [key for key in by_folder[0] if all(key in groups for groups in by_folder)]
    if not in_all:
        raise ConfigError("no method and budget is finished in all folders")
    rows = []
    for method, budget in in_all:
        groups_of_method = [groups[method, budget] for groups in by_folder]
        first, *others = [run for group in groups_of_method for run in group]
        for run in others:
            require_same(first.matrix["settings"], run.matrix["settings"], f"{first.folder} and {run.folder}", "order")
        scores = [{run.seed: run.matrix["metrics"][SCORE] for run in group} for group in groups_of_method]
        rows.append({"method": method, "budget": budget} | distribution(scores, default))
    found = [f"{r['method']} ({r['budget']}) {r['mean']:.3f} ± {r['standard_deviation']:.3f}" for r in rows]
    return {
        "finding": f"AP over {len(orders)} orders, mean ± standard deviation of runs: {'; '.join(found)}.",
        "score": SCORE,
        "orders": orders,
        "default_order": default,
        "methods": rows,
    }


def require_different_orders(folders: Sequence[Finished]) -> None:
    """Raises ConfigError: names what else differs, or that the order does not."""
    first, orders = folders[0], {tuple(folder.configuration["order"]) for folder in folders}
    if len(orders) < len(folders) or len(folders) < 2:
        raise ConfigError("order sensitivity needs at least two folders (--also), each with another order")
    if len({tuple(sorted(order)) for order in orders}) > 1:
        raise ConfigError(f"{first.out} and the others are not orders of the same tasks")
    for folder in folders:
        require_same(first.configuration, folder.configuration, f"{first.out} and {folder.out}", but="order")


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


def plot_order(measured: dict[str, Any]) -> Figure:
    """One dot a run; stars are the suite's own order."""
    figure = blank(4.2)
    axes = figure.add_subplot()
    for place, row in enumerate(measured["methods"]):
        scores = [run["score"] for run in row["runs"]]
        axes.plot([place] * len(scores), scores, "o", color=COLOURS[place % len(COLOURS)], markersize=4, alpha=0.7)
        axes.plot([place], [row["mean"]], "_", color="black", markersize=16)
        if row["default"] is not None:
            axes.plot([place], [row["default"]], "*", color="black", markersize=11)
    name_ticks(axes, [f"{row['method']}, {row['budget']}" for row in measured["methods"]])
    axes.set(ylabel=f"{measured['score']} after the last task")
    axes.set_title("One dot a run; bar: mean, star: the suite's own order", fontsize=9)
    return figure


def measure_sweeps(finished: Finished, options: Namespace) -> dict[str, Any]:
    """In the runs of --also the method has one setting that is not as in DIR; its curve has DIR's value too."""
    runs = finished.chosen(options)
    defaults = runs[0].matrix["settings"]
    curves: dict[str, list[dict[str, Any]]] = {}
    for folder in options.also:
        other = Finished.read(folder, options.model, options.data)
        which = f"{finished.out} and {folder}"
        require_same(finished.configuration, other.configuration, which, but="a setting")
        others = other.runs(runs[0].method, runs[0].budget, options.seed)
        settings = others[0].matrix["settings"]
        changed = [name for name in defaults if defaults[name] != settings.get(name)]
        if not changed:
            raise ConfigError(f"{which} have the same settings: there is no sweep")
        require_same(defaults, settings, which, but=changed[0])
        curves.setdefault(changed[0], [_point(changed[0], runs)]).append(_point(changed[0], others))
    if not curves:
        raise ConfigError("a sweep needs at least two values, found one: give the runs of others with --also")
    swept = {name: sorted(curve, key=lambda row: row["value"]) for name, curve in curves.items()}
    found = [
        f"{name}: " + ", ".join(f"{row[SCORE]['mean']:.3f} at {row['value']}" for row in curve)
        for name, curve in swept.items()
    ]
    return {
        "finding": f"AP of {runs[0].method} with {runs[0].budget} entries by {'; '.join(found)}.",
        "method": runs[0].method,
        "budget": runs[0].budget,
        "tasks": runs[0].order,
        "defaults": {name: defaults[name] for name in swept},
        "settings": swept,
    }


def _point(name: str, runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """A value's scores over its seeds."""
    scores = {score: spread([run.matrix["metrics"][score] for run in runs]) for score in SCORES}
    return {"value": runs[0].matrix["settings"][name], "seeds": [run.seed for run in runs]} | scores


def plot_sweeps(measured: dict[str, Any]) -> Figure:
    settings = measured["settings"]
    figure = blank(3.0)
    for number, (name, curve) in enumerate(settings.items()):
        axes = figure.add_subplot(1, len(settings), number + 1)
        for score, colour in zip(SCORES, COLOURS, strict=False):
            means = [row[score]["mean"] for row in curve]
            errors = [row[score]["standard_deviation"] or 0.0 for row in curve]
            axes.errorbar(range(len(curve)), means, errors, color=colour, marker="o", capsize=3, label=score)
        values = [row["value"] for row in curve]
        if measured["defaults"][name] in values:
            axes.axvline(values.index(measured["defaults"][name]), color="black", linestyle=":", linewidth=1)
        axes.set_xticks(range(len(values)), [str(value) for value in values])
        axes.set(xlabel=name)
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle(f"{measured['method']}, {measured['budget']} entries; dotted: the default", fontsize=9)
    return figure


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, sample standard deviation (n - 1) and standard error of the mean; a single value has neither of the two."""
    several = len(values) > 1
    return {
        "mean": statistics.mean(values),
        "standard_deviation": statistics.stdev(values) if several else None,
        "standard_error": standard_error(values) if several else None,
    }


def require_same(first: Mapping[str, Any], second: Mapping[str, Any], which: str, but: str) -> None:
    """Two mappings may differ in the key `but` alone. Raises ConfigError: names `which`, another key and its values."""
    for name in sorted({*first, *second} - {but, WHERE}):
        if first.get(name) != second.get(name):
            raise ConfigError(
                f"{which} differ in {name}, not in {but} alone: {first.get(name)!r} and {second.get(name)!r}"
            )
