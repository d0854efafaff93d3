"""Finished runs against each other: over orders of the tasks, over seeds, and over the values of one setting."""

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
from benchmarks.continual.diagnostics.statistics import (
    describe_runs,
    grouped,
    paired_difference,
    plus_minus,
    require_same,
    require_same_settings,
    scores_by_seed,
    spread,
)
from benchmarks.continual.diagnostics.sweep_runs import finished_sweeps, run_sweeps
from benchmarks.continual.methods import METHODS
from benchmarks.continual.results import Finished, FinishedRun
from inducekv_vllm.errors import ConfigError
from selector.report.plots import COLOURS


class Order:
    """How far the final score depends on the order in which the tasks are learned.

        python -m benchmarks.continual.diagnostics order --out DIR --also DIR ... [--score AP]

    Each folder is a finished `python -m benchmarks.continual run` that differs from the others in `--order` alone. One
    dot is one run (a seed of an order); stars are the suite's own order, if a folder has it. Of the runs of a method
    and budget: mean and standard deviation; and, because seeds are mixed in, the standard deviation between the means
    of the orders beside that within an order, over seeds.
    """

    SOURCE = 'paper, "Effect of Task Order"'

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--also", nargs="+", type=Path, default=[], metavar="DIR", help="the runs of other orders")
        parser.add_argument("--score", default="AP", help="which of the runs' metrics (default AP)")

    def measure(self, finished: Finished, options: Namespace) -> dict[str, Any]:
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
            require_same_settings([run for group in groups for run in group], but="order")
            scores = [scores_by_seed(group, options.score) for group in groups]
            rows.append({"method": key[0], "budget": key[1]} | distribution(scores, default))
        others = {key for groups in by_folder for key in groups} - set(in_all)
        return {
            "finding": self._finding(rows, options.score, len(orders)),
            "score": options.score,
            "orders": orders,
            "default_order": default,
            "methods": rows,
            "left_out": [f"{method} with budget {budget}: not in every folder" for method, budget in sorted(others)],
        }

    def _finding(self, rows: Sequence[Mapping[str, Any]], score: str, orders: int) -> str:
        values = [f"{r['method']} ({r['budget']}) {plus_minus(r['mean'], r['standard_deviation'])}" for r in rows]
        deviations = "mean ± standard deviation of runs"
        summary = f"Over {orders} orders of the tasks, {score} ({deviations}) is: {'; '.join(values)}"
        # No order matters to a model that learns nothing.
        learning = [row for row in rows if row["method"] != UNTOUCHED]
        if len(learning) < 2:
            return f"{summary}."
        least = min(learning, key=lambda row: row["standard_deviation"])
        return f"{summary}; the order matters least to {least['method']} ({least['budget']})."

    def plot(self, measured: dict[str, Any]) -> Figure:
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


class Seeds:
    """How far the scores of each method depend on the seed, and which differences between methods are larger than that.

        python -m benchmarks.continual.diagnostics seeds --out DIR [--method M] [--budget B]

    For AP, AF and the accuracy on base questions after the last task: mean, standard deviation (n - 1) and standard
    error over seeds, of every method and budget; and what M is ahead of each other method of the same budget, seed by
    seed, with the standard error of these paired differences and the 95% interval of Student's t. The seed draws
    anchors, batches, starts of training and first entries; the data are the same.
    """

    SOURCE = 'paper, "Statistical Reporting Protocol"'  # its table "Seed-level stability"
    SCORES = {"AP": "AP", "AF": "AF (less is better)", "base_final": "base questions, after the last task"}  # noqa: RUF012

    def add_arguments(self, parser: ArgumentParser) -> None:
        pass

    def measure(self, finished: Finished, options: Namespace) -> dict[str, Any]:
        reference = finished.chosen(options)
        method, budget = reference[0].method, reference[0].budget
        own = {name: scores_by_seed(reference, name) for name in self.SCORES}
        rows, differences = [], []
        for (other, its_budget), runs in grouped(finished.complete, options.seed).items():
            scores = {name: scores_by_seed(runs, name) for name in self.SCORES}
            values = {name: list(by_seed.values()) for name, by_seed in scores.items()}
            spreads = {name: {"values": of, **spread(of)} for name, of in values.items()}
            rows.append(describe_runs(runs) | {"scores": spreads})
            if its_budget == budget and other != method:
                paired = {name: paired_difference(own[name], scores[name]) for name in self.SCORES}
                differences.append({"method": other, "budget": its_budget, "scores": paired})
        return {
            "finding": self._finding(method, budget, rows, differences),
            "compared": {"method": method, "budget": budget},
            "methods": rows,
            "ahead_of": differences,
        }

    def _finding(
        self, method: str, budget: int, rows: Sequence[Mapping[str, Any]], differences: Sequence[Mapping[str, Any]]
    ) -> str:
        row = next(row for row in rows if (row["method"], row["budget"]) == (method, budget))
        ap = row["scores"]["AP"]
        mean = f"{plus_minus(ap['mean'], ap['standard_error'])} (standard error)"
        summary = f"AP of {method} (budget {budget}) over {len(row['seeds'])} seeds is {mean}"
        intervals = {other["method"]: other["scores"]["AP"]["interval"] or (0.0, 0.0) for other in differences}
        verdicts = {
            "ahead of": [name for name, (low, _) in intervals.items() if low > 0],
            "behind": [name for name, (_, high) in intervals.items() if high < 0],
            "not told apart from": [name for name, (low, high) in intervals.items() if low <= 0 <= high],
        }
        listed = [f"{verdict} {', '.join(names)}" for verdict, names in verdicts.items() if names]
        return f"{summary}; with 95% confidence, seed by seed, it is {'; '.join(listed)}." if listed else f"{summary}."

    def plot(self, measured: dict[str, Any]) -> Figure:
        methods = measured["methods"]
        figure = blank(1.0 + 0.3 * len(methods))
        for number, (name, label) in enumerate(self.SCORES.items()):
            axes = figure.add_subplot(1, len(self.SCORES), number + 1)
            for place, row in enumerate(methods):
                score, colour = row["scores"][name], COLOURS[place % len(COLOURS)]
                axes.plot(score["values"], [place] * len(score["values"]), "o", color=colour, markersize=4, alpha=0.5)
                error = score["standard_error"]
                axes.errorbar(score["mean"], place, xerr=error, fmt="|", color="black", markersize=9, capsize=3)
            names = [f"{row['method']}, {row['budget']}" for row in methods]
            axes.set_yticks(range(len(names)), names if number == 0 else [])
            axes.set_ylim(len(names) - 0.4, -0.6)
            axes.set(xlabel=label)
        figure.suptitle("One dot a seed; mean and standard error", fontsize=9)
        return figure


class Sweeps:
    """How the scores of a method change with one setting at a time, on a short stream.

        python -m benchmarks.continual.diagnostics sweeps --out DIR --method paper --budget 8 \\
            --setting beta=0.1,0.3,0.5,1 --setting gamma=0,0.05,0.1,0.3 --setting m=4,8,16 --setting J=1,5,10,20 \\
            [--tasks guild field beside] [--seed 0 1 2] [--set KEY=VALUE ...]

    DIR is the folder of a run, whose suite, model and limits are taken. Each value has a run of its own in
    DIR/diagnostics/sweeps/NAME=VALUE, so a command that was killed goes on where it was. Then all finished sweeps of
    the method and budget that lie there are read, those of earlier commands too; without --setting nothing is run.
    Questions are answered in this process. A setting has the name of the method's field, or one of the paper's letters:
    m payload tokens an entry, J inner steps, A anchors a task.
    """

    SOURCE = 'paper, "Hyperparameter Sensitivity"'
    SCORES = ("AP", "AF", "base_final")

    def add_arguments(self, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--setting", action="append", default=[], metavar="NAME=V1,V2,...", help="run the stream with each value")
        add("--tasks", nargs="+", help="the short stream (default: the run's first 3 tasks)")
        add("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting, the same in all runs")

    def measure(self, finished: Finished, options: Namespace) -> dict[str, Any]:
        budget = options.budget if options.budget is not None else finished.runs(options.method)[0].budget
        folder = finished.out / "diagnostics" / "sweeps"
        run_sweeps(finished, folder, budget, options)
        runs = finished_sweeps(folder, options.method, budget, options.seed)
        settings = {name: self.curve(name, of) for name, of in runs.items()}
        tasks = next(iter(runs.values()))[0].order
        return {
            "finding": self._finding(options.method, budget, tasks, settings),
            "method": options.method,
            "budget": budget,
            "tasks": tasks,
            "defaults": {name: getattr(METHODS.get(options.method), name, None) for name in settings},
            "settings": settings,
        }

    def curve(self, name: str, runs: Sequence[FinishedRun]) -> list[dict[str, Any]]:
        """One point for each value of a setting, rising: means and deviations of the scores over seeds."""
        require_same_settings(runs, but=name)
        by_value: dict[Any, list[FinishedRun]] = {}
        for run in runs:
            by_value.setdefault(run.matrix["settings"][name], []).append(run)
        return [
            {"value": value, "seeds": [run.seed for run in of]}
            | {score: spread([run.matrix["metrics"][score] for run in of]) for score in self.SCORES}
            for value, of in sorted(by_value.items())
        ]

    def _finding(
        self, method: str, budget: int, tasks: Sequence[str], settings: Mapping[str, Sequence[Mapping[str, Any]]]
    ) -> str:
        ranges = []
        for name, curve in settings.items():
            by_value = {point["value"]: point["AP"]["mean"] for point in curve}
            low, high = min(by_value.values()), max(by_value.values())
            best = f"(best at {max(by_value, key=by_value.__getitem__)})"
            ranges.append(f"{low:.3f} to {high:.3f} over {name} {best}" if high > low else f"{low:.3f} at any {name}")
        return f"AP of {method} with {budget} entries on {', '.join(tasks)}: {'; '.join(ranges)}."

    def plot(self, measured: dict[str, Any]) -> Figure:
        settings = measured["settings"]
        columns = min(3, len(settings))
        rows = -(-len(settings) // columns)
        figure = blank(0.5 + 2.4 * rows)
        for number, (name, curve) in enumerate(settings.items()):
            axes = figure.add_subplot(rows, columns, number + 1)
            for score, colour in zip(self.SCORES, COLOURS, strict=False):
                means = [point[score]["mean"] for point in curve]
                errors = [point[score]["standard_deviation"] or 0.0 for point in curve]
                look = {"color": colour, "marker": "o", "markersize": 4, "capsize": 3}
                axes.errorbar(range(len(curve)), means, errors, label=score, **look)
            values = [point["value"] for point in curve]
            if measured["defaults"][name] in values:
                axes.axvline(values.index(measured["defaults"][name]), color="black", linestyle=":", linewidth=1)
            axes.set_xticks(range(len(values)), [str(value) for value in values])
            axes.set(xlabel=name)
            if number == 0:
                axes.legend(fontsize=8, frameon=False)
        subject = f"{measured['method']}, {measured['budget']} entries, on {', '.join(measured['tasks'])}"
        figure.suptitle(f"{subject}; dotted: the default", fontsize=9)
        return figure
