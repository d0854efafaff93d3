"""How the scores of a method change with one setting at a time.

    python -m benchmarks.continual.diagnostics sweeps --out DIR --method paper --also DIR ...

Each folder is a finished `python -m benchmarks.continual run`. In those of --also the method has one setting that is
not as in DIR, the same or different ones; its curve has DIR's value too. Means and deviations are over seeds.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.continual.diagnostics.drawing import blank
from benchmarks.continual.diagnostics.statistics import require_same, spread
from benchmarks.continual.results import Finished, FinishedRun
from inducekv_vllm.errors import ConfigError
from selector.report.plots import COLOURS

SOURCE = 'paper, "Hyperparameter Sensitivity"'
SCORES = ("AP", "AF", "base_final")


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--also", nargs="+", type=Path, default=[], metavar="DIR", help="the runs of other values")


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    runs = finished.chosen(options)
    defaults = runs[0].matrix["settings"]
    curves: dict[str, list[dict[str, Any]]] = {}
    for folder in options.also:
        other = Finished.read(folder, options.model, options.data)
        require_same(finished.configuration, other.configuration, f"{finished.out} and {folder}", but="a setting")
        others = other.runs(runs[0].method, runs[0].budget, options.seed)
        name = changed_setting(defaults, others[0].matrix["settings"], f"{finished.out} and {folder}")
        curves.setdefault(name, [point(name, runs)]).append(point(name, others))
    if not curves:
        raise ConfigError("a sweep needs at least two values, found one: give the runs of others with --also")
    settings = {name: sorted(curve, key=lambda row: row["value"]) for name, curve in curves.items()}
    return {
        "finding": _finding(runs[0], settings),
        "method": runs[0].method,
        "budget": runs[0].budget,
        "tasks": runs[0].order,
        "defaults": {name: defaults[name] for name in settings},
        "settings": settings,
    }


def changed_setting(first: Mapping[str, Any], second: Mapping[str, Any], which: str) -> str:
    """The one setting in which they differ. Raises ConfigError: there is none, or another one."""
    changed = [name for name in first if first[name] != second.get(name)]
    if not changed:
        raise ConfigError(f"{which} have the same settings: there is no sweep")
    require_same(first, second, which, but=changed[0])
    return changed[0]


def point(name: str, runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """A value's scores over its seeds."""
    scores = {score: spread([run.matrix["metrics"][score] for run in runs]) for score in SCORES}
    return {"value": runs[0].matrix["settings"][name], "seeds": [run.seed for run in runs]} | scores


def _finding(run: FinishedRun, settings: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    ranges = []
    for name, curve in settings.items():
        by_value = {row["value"]: row["AP"]["mean"] for row in curve}
        low, high = min(by_value.values()), max(by_value.values())
        best = f"(best at {max(by_value, key=by_value.__getitem__)})"
        ranges.append(f"{low:.3f} to {high:.3f} over {name} {best}" if high > low else f"{low:.3f} at any {name}")
    return f"AP of {run.method} with {run.budget} entries on {', '.join(run.order)}: {'; '.join(ranges)}."


def plot(measured: dict[str, Any]) -> Figure:
    settings = measured["settings"]
    columns = min(3, len(settings))
    rows = -(-len(settings) // columns)
    figure = blank(0.5 + 2.4 * rows)
    for number, (name, curve) in enumerate(settings.items()):
        axes = figure.add_subplot(rows, columns, number + 1)
        for score, colour in zip(SCORES, COLOURS, strict=False):
            means = [row[score]["mean"] for row in curve]
            errors = [row[score]["standard_deviation"] or 0.0 for row in curve]
            look = {"color": colour, "marker": "o", "markersize": 4, "capsize": 3}
            axes.errorbar(range(len(curve)), means, errors, label=score, **look)
        values = [row["value"] for row in curve]
        if measured["defaults"][name] in values:
            axes.axvline(values.index(measured["defaults"][name]), color="black", linestyle=":", linewidth=1)
        axes.set_xticks(range(len(values)), [str(value) for value in values])
        axes.set(xlabel=name)
        if number == 0:
            axes.legend(fontsize=8, frameon=False)
    subject = f"{measured['method']}, {measured['budget']} entries, on {', '.join(measured['tasks'])}"
    figure.suptitle(f"{subject}; dotted: the default", fontsize=9)
    return figure
