"""The command: see the package."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.machine import describe_machine
from benchmarks.research.continual.diagnostics import calibration, comparison, diversity, memory_attention, retrieval
from benchmarks.research.continual.results import Finished
from benchmarks.research.drawing import png
from inducekv_vllm.errors import InduceKVError
from selector.runtime.files import replace_file

PROGRAM = "python -m benchmarks.research.continual.diagnostics"


@dataclass(frozen=True)
class Diagnostic:
    """One figure of the paper."""

    source: str  # the section of the paper
    # From a run and the options to JSON values, of which "finding" is a sentence. Raises InduceKVError: what it lacks.
    measure: Callable[[Finished, argparse.Namespace], dict[str, Any]]
    plot: Callable[[dict[str, Any]], Figure]  # of what `measure` returned, read back from JSON: NaN is None
    method: str = "refined"


DIAGNOSTICS: Mapping[str, Diagnostic] = {
    "ambiguity": Diagnostic("When Does InduceKV Help the Most?", retrieval.measure_ambiguity, retrieval.plot_ambiguity),
    "calibration": Diagnostic("Calibration-dynamics protocol", calibration.measure, calibration.plot, "paper"),
    "diversity": Diagnostic("Inducing-set diversity protocol", diversity.measure, diversity.plot, "paper"),
    "hit_rate": Diagnostic("Retrieval Quality Diagnosis", retrieval.measure_hit_rate, retrieval.plot_hit_rate),
    "memory_attention": Diagnostic(
        "Memory-attention utilization protocol", memory_attention.measure, memory_attention.plot
    ),
    "order": Diagnostic("Effect of Task Order", comparison.measure_order, comparison.plot_order),
    "sweeps": Diagnostic("Hyperparameter Sensitivity", comparison.measure_sweeps, comparison.plot_sweeps),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        print(json.dumps(run(options)))
    except InduceKVError as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures, plots and writes; returns finding and paths."""
    diagnostic = DIAGNOSTICS[options.diagnostic]
    head = {"diagnostic": options.diagnostic, "source": diagnostic.source}
    finished = Finished.read(options.out, options.model, options.data)
    measured = as_json(head | diagnostic.measure(finished, options) | {"machine": describe_machine()})
    path = options.out / "diagnostics" / f"{options.diagnostic}.json"
    picture = png(diagnostic.plot, measured, dots_per_inch=120)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path.with_suffix(".png"), picture)
    # Last: if it exists, so does its picture.
    replace_file(path, (json.dumps(measured, indent=1, allow_nan=False) + "\n").encode())
    return head | {"finding": measured["finding"], "files": [str(path), str(path.with_suffix(".png"))]}


def as_json(value: Any) -> Any:
    """As read back from JSON, numbers with six significant digits; what is not a finite number is None."""
    if isinstance(value, dict):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Explains the numbers of a finished run.")
    commands = parser.add_subparsers(dest="diagnostic", required=True, metavar="NAME")
    for name, diagnostic in DIAGNOSTICS.items():
        add = commands.add_parser(name, help=f"the paper's {diagnostic.source!r}").add_argument
        add("--out", type=Path, required=True, help="the folder of a finished run")
        add("--method", default=diagnostic.method, help="(default: %(default)s)")
        add("--budget", type=int, help="(default: the method's only one)")
        add("--seed", nargs="+", type=int, help="(default: all there are)")
        add("--model", type=Path, help="the model of the run (default: where the run found it)")
        add("--data", type=Path, help="the suite's data (default: where the run found them)")
        if name in ("order", "sweeps"):
            add("--also", nargs="+", type=Path, default=[], metavar="DIR", help="runs that differ in that alone")
        if name in ("hit_rate", "ambiguity"):
            add("--top-k", type=int, default=8, help="entries that count as retrieved (default %(default)s)")
        if name == "memory_attention":
            add("--limit", type=int, default=500, help="questions of each task, at most (default %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
