"""What a budget costs and buys: bytes, time to the first token, decoding speed, and AP, for every budget of a method.

    python -m benchmarks.continual.diagnostics operating_points --out DIR [--method M]

Scores and bytes are the run's. Times are measured here (see `speed`): the memory or adapter after the last task on the
real server, one request at a time unless --concurrency says otherwise. The time to the first token is what the paper
calls prefill; the decoding speed is 1 / (time per output token after the first). The untouched model is measured
beside them where the run has it.

Source: the paper's section "Budget-Latency-Quality Operating Points".
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
from benchmarks.continual.results import Finished
from benchmarks.machine import describe_machine
from inducekv_vllm.errors import ConfigError
from selector.report.plots import COLOURS

SOURCE = 'paper, "Budget-Latency-Quality Operating Points"'
PANELS = {
    "AP": "AP",
    "ttft_ms": "time to first token, ms",
    "decode_tokens_per_s": "decoding, tokens a second",
}


def add_arguments(parser: ArgumentParser) -> None:
    speed.add_arguments(parser, concurrency=1)


def measure(finished: Finished, options: Namespace) -> dict[str, Any]:
    """
    Raises:
        ConfigError: there is no finished run of the method, or nothing could be measured.
    """
    groups = grouped(finished.complete, options.seed)
    chosen = [
        group
        for (method, budget), group in groups.items()
        if method == options.method and options.budget in (None, budget)
    ]
    if not chosen:
        raise ConfigError(f"no finished run of {options.method} under {finished.out}")
    untouched = [group for (method, _), group in groups.items() if method == UNTOUCHED][:1]
    beside = [] if options.method == UNTOUCHED else untouched
    points = speed.measured_points(finished, [*beside, *chosen], options)
    return {
        "diagnostic": "operating_points",
        "source": SOURCE,
        "says": says(options.method, points[len(beside) :]),
        "method": options.method,
        "load": asdict(speed.Load.of(options)),
        "machine": describe_machine(),
        "untouched": points[0] if beside else None,
        "budgets": points[len(beside) :],
    }


def plot(found: dict[str, Any]) -> Figure:
    figure = blank(3.2)
    measured = [point for point in found["budgets"] if not point["why"]]
    for number, (name, label) in enumerate(PANELS.items()):
        axes = figure.add_subplot(1, len(PANELS), number + 1)
        heights = [_value(point, name) for point in measured]
        errors = [point[name]["standard_error"] or 0.0 for point in measured] if name == "AP" else None
        axes.errorbar(range(len(measured)), heights, yerr=errors, color=COLOURS[number], marker="o", capsize=3)
        if found["untouched"] and not found["untouched"]["why"]:
            axes.axhline(_value(found["untouched"], name), color="black", linestyle=":", linewidth=1, label=UNTOUCHED)
            axes.legend(fontsize=8, frameon=False)
        ticks = [f"{point['budget']}\n{point['bytes'] / 1024:.0f} KiB" for point in measured]
        axes.set_xticks(range(len(measured)), ticks)
        axes.set(xlabel="entries", ylabel=label)
    figure.suptitle(f"{found['method']}, requests at a time: {found['load']['concurrency']}", fontsize=9)
    return figure


def says(method: str, points: Sequence[Mapping[str, Any]]) -> str:
    told = [
        f"{point['budget']} entries ({point['bytes'] / 1024:.0f} KiB): AP {point['AP']['mean']:.3f}, first token after "
        f"{point['ttft_ms']:.0f} ms, then {point['decode_tokens_per_s']:.0f} tokens a second"
        for point in points
        if not point["why"]
    ]
    left_out = [f"{point['budget']} entries could not be served ({point['why']})" for point in points if point["why"]]
    return f"{method}, by budget: {'; '.join([*told, *left_out])}."


def _value(point: Mapping[str, Any], name: str) -> float:
    return point[name]["mean"] if isinstance(point[name], Mapping) else point[name]
