"""The roofline plot of a result: `python -m benchmarks.kernels.plot RESULT.json PLOT.svg`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.drawing import COLOURS, STYLE

MARKERS = {"decode": "o", "prefill": "s"}
TERA = 1e12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="JSON of benchmarks.kernels.run, measured on a GPU")
    parser.add_argument("plot", type=Path, help="the SVG to write")
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    if "peaks" not in result:
        parser.error(f"{args.result} has no times: it was not measured on a GPU")
    with mpl.rc_context(STYLE):
        draw(result).savefig(args.plot, format="svg", metadata={"Date": None, "Creator": None})
    return 0


def draw(result: dict[str, Any]) -> Figure:
    """Operations per second over operations per byte, both axes logarithmic."""
    bandwidth, peak = (result["peaks"][name] for name in ("bytes_per_second", "operations_per_second"))
    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    measured = [case for case in result["attention"] if "us" in case]
    intensity = [case["operations"] / case["bytes"] for case in measured]
    ends = [min(intensity) / 2, peak / bandwidth, max(*intensity, peak / bandwidth) * 2]
    roof = [min(peak, bandwidth * x) / TERA for x in ends]
    axes.plot(ends, roof, color="black", linewidth=1, label="copying, and a large matrix product")
    for (phase, marker), colour in zip(MARKERS.items(), COLOURS, strict=False):
        chosen = [(x, case) for x, case in zip(intensity, measured, strict=True) if case["phase"] == phase]
        speeds = [case["operations"] / case["us"] * 1e6 / TERA for _, case in chosen]
        axes.plot([x for x, _ in chosen], speeds, marker, color=colour, markersize=5, label=phase)
    axes.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="10¹² operations per second")
    axes.set_title(f"memory attention, {result['geometry']}, {result['dtype']}, {result['machine']['gpu']}", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    return figure


if __name__ == "__main__":
    sys.exit(main())
