"""Which methods are worth their time: tokens a second against AP, and the front that nothing beats.

    python -m benchmarks.continual.diagnostics pareto --out DIR [--methods no_memory lora_replay prompt_replay refined]

Every method and budget of the run (or those of --methods and --budget) is one point: AP and AF are the run's, tokens a
second are measured here (see `speed`), of all requests together, --concurrency of them at a time. A method whose
answers cannot be served in this way has no place on the plot; the JSON and the sentence say which and why.

Source: the paper's section "Memory-Compute-Quality Trade-off".
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from matplotlib.figure import Figure

from benchmarks.continual.comparison import UNTOUCHED
from benchmarks.continual.diagnostics import speed
from benchmarks.continual.diagnostics.drawing import blank
from benchmarks.continual.diagnostics.groups import grouped
from benchmarks.continual.diagnostics.pareto_front import pareto_front
from benchmarks.continual.results import Finished
from benchmarks.machine import describe_machine
from inducekv_vllm.errors import ConfigError
from selector.report.plots import COLOURS

SOURCE = 'paper, "Memory-Compute-Quality Trade-off"'
PALEST = 0.25  # opacity of the point that forgets most


def add_arguments(parser: ArgumentParser) -> None:
    speed.add_arguments(parser, concurrency=4)
    parser.add_argument("--methods", nargs="+", help="(default: all that the run has finished)")


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    """
    Raises:
        ConfigError: a method has no finished run, or nothing could be measured.
    """
    groups = {
        key: group
        for key, group in grouped(finished.complete, options.seed).items()
        if options.budget in (None, key[1]) and (options.methods is None or key[0] in options.methods)
    }
    for needless in [key for key in groups if key[0] == UNTOUCHED][1:]:  # it is the same with every budget
        del groups[needless]
    there = {method for method, _ in groups}
    if missing := sorted(set(options.methods or ()) - there):
        raise ConfigError(f"no finished run of {missing[0]} under {finished.out}")
    if not groups:
        raise ConfigError(f"no finished run under {finished.out}")
    points = with_front(speed.measured_points(finished, list(groups.values()), options))
    return {
        "diagnostic": "pareto",
        "source": SOURCE,
        "says": says(points, options.concurrency),
        "load": asdict(speed.Load.of(options)),
        "machine": describe_machine(),
        "points": points,
    }


def with_front(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each with "on_front": whether no other beats it in speed and AP (see `pareto_front`); None where not measured."""
    measured = [row for row, point in enumerate(points) if not point["why"]]
    front = pareto_front([(points[row]["tokens_per_s"], points[row]["AP"]["mean"]) for row in measured])
    on_front = {measured[row] for row in front}
    return [{**point, "on_front": row in on_front if row in measured else None} for row, point in enumerate(points)]


def plot(found: dict[str, Any]) -> Figure:
    """Points are numbered from the best AP down."""
    points = sorted((point for point in found["points"] if not point["why"]), key=lambda point: -point["AP"]["mean"])
    figure = blank(max(4.4, 0.6 + 0.17 * len(points)))
    axes = figure.add_subplot()
    most_forgotten = max(point["AF"]["mean"] for point in points)
    methods = list(dict.fromkeys(point["method"] for point in points))
    for number, point in enumerate(points, start=1):
        x, y = point["tokens_per_s"], point["AP"]["mean"]
        kept = 1 - point["AF"]["mean"] / most_forgotten if most_forgotten > 0 else 1.0
        axes.plot(
            [x],
            [y],
            "o",
            color=COLOURS[methods.index(point["method"]) % len(COLOURS)],
            alpha=PALEST + (1 - PALEST) * kept,
            markersize=8,
            label=f"{number} {point['method']}, {point['budget']}",
        )
        axes.annotate(str(number), (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8)
    front = sorted((point["tokens_per_s"], point["AP"]["mean"]) for point in points if point["on_front"])
    axes.plot(*zip(*front, strict=True), color="black", linewidth=1, linestyle="--", zorder=0)
    axes.set(xlabel=f"output tokens a second, {found['load']['concurrency']} requests at a time", ylabel="AP")
    axes.set_title("Dashed: the front; the paler, the more was forgotten", fontsize=9)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def says(points: Sequence[Mapping[str, Any]], concurrency: int) -> str:
    front = sorted((point for point in points if point["on_front"]), key=lambda point: -point["tokens_per_s"])
    told = [
        f"{point['method']} ({point['budget']}) with {point['tokens_per_s']:.0f} tokens a second and AP "
        f"{point['AP']['mean']:.3f}"
        for point in front
    ]
    said = f"With {concurrency} requests at a time no method beats {'; '.join(told)} in both speed and AP."
    left_out = dict.fromkeys(f"{point['method']}: {point['why']}" for point in points if point["why"])
    return f"{said} Not measured: {'; '.join(left_out)}." if left_out else said
