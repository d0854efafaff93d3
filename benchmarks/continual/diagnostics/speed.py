"""Speed against accuracy: over the methods (the Pareto front), and over the budgets of one method."""

from __future__ import annotations

from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from benchmarks.continual.comparison import UNTOUCHED
from benchmarks.continual.diagnostics.drawing import blank
from benchmarks.continual.diagnostics.served_speed import Load, measure_speeds
from benchmarks.continual.diagnostics.statistics import Group, grouped, pareto_front, spread
from benchmarks.continual.results import Finished
from inducekv_vllm.errors import ConfigError
from selector.report.plots import COLOURS

PALEST = 0.25  # opacity of the point that forgets most


class _Speed:
    """Both diagnostics: scores are the run's, speeds are measured here, on the server that users run."""

    CONCURRENCY: int  # by default

    def add_arguments(self, parser: ArgumentParser) -> None:
        add, at_once = parser.add_argument, "requests under way at once (default %(default)s)"
        add("--concurrency", type=int, default=self.CONCURRENCY, help=at_once)
        add("--requests", type=int, default=8, help="of a method in each round (default 8)")
        add("--rounds", type=int, default=4, help="that count (default 4)")
        add("--output-tokens", type=int, default=32, help="of every request (default 32)")
        add("--serve-args", nargs=REMAINDER, default=[], help="flags for the servers, last of all")


def measured_points(finished: Finished, groups: Sequence[Group], options: Namespace) -> dict[str, Any]:
    """Of each group its scores over the seeds, its bytes, and the speed of its first seed's last artifact: "points".

    A point without times has the reason in "why". Raises ConfigError: nothing could be served.
    """
    load = Load(options.concurrency, options.requests, options.rounds, options.output_tokens)
    speeds = measure_speeds(finished, [group[0] for group in groups], load, options.serve_args)
    if all(speed["why"] for speed in speeds):
        raise ConfigError(f"nothing could be served: {'; '.join(dict.fromkeys(speed['why'] for speed in speeds))}")
    points = [scores_of(group) | speed for group, speed in zip(groups, speeds, strict=True)]
    return {"load": asdict(load), "points": points}


def scores_of(group: Group) -> dict[str, Any]:
    """Means over the seeds; bytes are those that inference needs beside the model."""
    return {
        "method": group[0].method,
        "budget": group[0].budget,
        "seeds": [run.seed for run in group],
        "bytes": mean(run.matrix["stored_bytes"][-1] for run in group),
        **{name: spread([run.matrix["metrics"][name] for run in group]) for name in ("AP", "AF")},
    }


class Pareto(_Speed):
    """Which methods are worth their time: tokens a second against AP, and the Pareto front.

        python -m benchmarks.continual.diagnostics pareto --out DIR [--methods no_memory lora_replay refined]

    Every method and budget of the run (or those of --methods and --budget) is one point: AP and AF are the run's,
    tokens a second are measured here (see `served_speed`), of all requests together, --concurrency of them at a time. A
    method whose answers cannot be served in this way has no place on the plot; the JSON names it, and the reason.
    """

    SOURCE = 'paper, "Memory-Compute-Quality Trade-off"'
    CONCURRENCY = 4

    def add_arguments(self, parser: ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--methods", nargs="+", help="(default: all that the run has finished)")

    def measure(self, finished: Finished, options: Namespace) -> dict[str, Any]:
        groups = {
            key: group
            for key, group in grouped(finished.complete, options.seed).items()
            if options.budget in (None, key[1]) and (options.methods is None or key[0] in options.methods)
        }
        for repeated in [key for key in groups if key[0] == UNTOUCHED][1:]:  # it is the same with every budget
            del groups[repeated]
        available = {method for method, _ in groups}
        if missing := sorted(set(options.methods or ()) - available):
            raise ConfigError(f"no finished run of {missing[0]} under {finished.out}")
        if not groups:
            raise ConfigError(f"no finished run under {finished.out}")
        measured = measured_points(finished, list(groups.values()), options)
        points = with_front(measured["points"])
        return {"finding": pareto_finding(points, options.concurrency), **measured, "points": points}

    def plot(self, measured: dict[str, Any]) -> Figure:
        """Points are numbered from the best AP down."""
        points = [point for point in measured["points"] if not point["why"]]
        points.sort(key=lambda point: -point["AP"]["mean"])
        figure = blank(max(4.4, 0.6 + 0.17 * len(points)))
        axes = figure.add_subplot()
        most_forgotten = max(point["AF"]["mean"] for point in points)
        methods = list(dict.fromkeys(point["method"] for point in points))
        for number, point in enumerate(points, start=1):
            x, y = point["tokens_per_s"], point["AP"]["mean"]
            kept = 1 - point["AF"]["mean"] / most_forgotten if most_forgotten > 0 else 1.0
            colour, alpha = COLOURS[methods.index(point["method"]) % len(COLOURS)], PALEST + (1 - PALEST) * kept
            label = f"{number} {point['method']}, {point['budget']}"
            axes.plot([x], [y], "o", markersize=8, label=label, color=colour, alpha=alpha)
            axes.annotate(str(number), (x, y), xytext=(5, 4), textcoords="offset points", fontsize=8)
        front = sorted((point["tokens_per_s"], point["AP"]["mean"]) for point in points if point["on_front"])
        axes.plot(*zip(*front, strict=True), color="black", linewidth=1, linestyle="--", zorder=0)
        axes.set(xlabel=f"output tokens a second, {measured['load']['concurrency']} requests at a time", ylabel="AP")
        axes.set_title("Dashed: the front; the paler, the more was forgotten", fontsize=9)
        axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        return figure


def with_front(points: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each with "on_front": whether no other dominates it in speed and AP; None if it was not measured."""
    measured = [row for row, point in enumerate(points) if not point["why"]]
    front = pareto_front([(points[row]["tokens_per_s"], points[row]["AP"]["mean"]) for row in measured])
    on_front = {measured[row] for row in front}
    return [{**point, "on_front": row in on_front if row in measured else None} for row, point in enumerate(points)]


def pareto_finding(points: Sequence[Mapping[str, Any]], concurrency: int) -> str:
    front = sorted((point for point in points if point["on_front"]), key=lambda point: -point["tokens_per_s"])
    best = [
        f"{p['method']} ({p['budget']}) with {p['tokens_per_s']:.0f} tokens a second and AP {p['AP']['mean']:.3f}"
        for p in front
    ]
    summary = f"With {concurrency} requests at a time no method beats {'; '.join(best)} in both speed and AP."
    left_out = dict.fromkeys(f"{point['method']}: {point['why']}" for point in points if point["why"])
    return f"{summary} Not measured: {'; '.join(left_out)}." if left_out else summary


class OperatingPoints(_Speed):
    """What a budget costs and buys: bytes, time to the first token, decoding speed and AP, for each budget of a method.

        python -m benchmarks.continual.diagnostics operating_points --out DIR [--method M]

    Scores and bytes are the run's. Times are measured here (see `served_speed`): the memory or adapter after the last
    task on the real server, one request at a time unless --concurrency is given. The time to the first token is what
    the paper calls prefill; the decoding speed is 1 / (time per output token after the first). The untouched model is
    measured beside them if the run has it.
    """

    SOURCE = 'paper, "Budget-Latency-Quality Operating Points"'
    CONCURRENCY = 1
    PANELS = (
        ("AP", "AP"),
        ("ttft_ms", "time to first token, ms"),
        ("decode_tokens_per_s", "decoding, tokens a second"),
    )

    def measure(self, finished: Finished, options: Namespace) -> dict[str, Any]:
        groups = grouped(finished.complete, options.seed)
        chosen = [groups[key] for key in groups if key[0] == options.method and options.budget in (None, key[1])]
        if not chosen:
            raise ConfigError(f"no finished run of {options.method} under {finished.out}")
        untouched = [groups[key] for key in groups if key[0] == UNTOUCHED][:1]
        beside = [] if options.method == UNTOUCHED else untouched
        measured = measured_points(finished, [*beside, *chosen], options)
        points = measured.pop("points")
        budgets = points[len(beside) :]
        return {
            "finding": self._finding(options.method, budgets),
            "method": options.method,
            **measured,
            "untouched": points[0] if beside else None,
            "budgets": budgets,
        }

    def _finding(self, method: str, points: Sequence[Mapping[str, Any]]) -> str:
        served = [
            f"{point['budget']} entries ({point['bytes'] / 1024:.0f} KiB): AP {point['AP']['mean']:.3f}, first token "
            f"after {point['ttft_ms']:.0f} ms, then {point['decode_tokens_per_s']:.0f} tokens a second"
            for point in points
            if not point["why"]
        ]
        refused = [f"{p['budget']} entries could not be served ({p['why']})" for p in points if p["why"]]
        return f"{method}, by budget: {'; '.join([*served, *refused])}."

    def plot(self, measured: dict[str, Any]) -> Figure:
        def value(point: Mapping[str, Any], name: str) -> float:
            return point[name]["mean"] if isinstance(point[name], Mapping) else point[name]

        figure = blank(3.2)
        points, untouched = [point for point in measured["budgets"] if not point["why"]], measured["untouched"]
        for number, (name, label) in enumerate(self.PANELS):
            axes = figure.add_subplot(1, len(self.PANELS), number + 1)
            heights = [value(point, name) for point in points]
            errors = [point[name]["standard_error"] or 0.0 for point in points] if name == "AP" else None
            axes.errorbar(range(len(points)), heights, yerr=errors, color=COLOURS[number], marker="o", capsize=3)
            if untouched and not untouched["why"]:
                axes.axhline(value(untouched, name), color="black", linestyle=":", linewidth=1, label=UNTOUCHED)
                axes.legend(fontsize=8, frameon=False)
            ticks = [f"{point['budget']}\n{point['bytes'] / 1024:.0f} KiB" for point in points]
            axes.set_xticks(range(len(points)), ticks)
            axes.set(xlabel="entries", ylabel=label)
        figure.suptitle(f"{measured['method']}, requests at a time: {measured['load']['concurrency']}", fontsize=9)
        return figure
