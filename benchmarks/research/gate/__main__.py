"""Measures the relevance gate: which of a stream's questions, asked in many ways, it routes, and what else opens it.

The gate is the one that a stream has after its last task, fitted for each seed; or that of a bundle. All gates are
asked the same questions: test questions of the tasks in wordings and phrases that no fit has, base questions,
near-misses, everyday requests and noise. Nothing is served: transformers computes what the gate sees, and the server's
rule decides.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console

from benchmarks.machine import describe_machine
from benchmarks.real.model import cache_folder
from benchmarks.research.continual.suites import Suite, load_suite, require_own_model, require_reader
from benchmarks.research.gate.asking import (
    NEAR_MISSES,
    MeasuredGate,
    ask,
    fitted,
    of_bundle,
    order_of,
    protocol_questions,
)
from benchmarks.research.gate.table import as_json, print_gates, print_tables, rows_of
from inducekv_vllm.errors import InduceKVError
from selector.backbone.model import Backbone
from selector.gate.settings import Kind
from selector.runtime.files import replace_file
from server.demo import CHECKPOINT

PROGRAM = "python -m benchmarks.research.gate"
WIDTH = 120  # of what is printed into a file


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        run(options)
    except InduceKVError as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Prints the tables; returns what `--out` gets."""
    require_own_model(options.suite, options.model)
    suite = load_suite(options.suite, options.data or cache_folder() / "gate-data" / options.suite)
    require_reader(suite, options.model)
    backbone = Backbone.load(options.model)
    suite, gates = measured_gates(options, suite, backbone)
    began = time.monotonic()
    asked = ask(backbone, [gate.gate for gate in gates], protocol_questions(suite, options.tests))
    rows, seconds = rows_of(asked), time.monotonic() - began
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    print_gates(gates, console)
    print_tables(rows, [task.name for task in suite.tasks], console)
    result = {
        "benchmark": "gate",
        "suite": suite.name,
        "model": options.model.name,
        "data": suite.digest(),
        "tests": options.tests,
        "asking_seconds": round(seconds, 1),
        **as_json(rows, gates),
        "machine": describe_machine(),
    }
    if options.out:
        replace_file(options.out, (json.dumps(result, indent=1) + "\n").encode())
    return result


def measured_gates(options: argparse.Namespace, suite: Suite, backbone: Backbone) -> tuple[Suite, list[MeasuredGate]]:
    """The gates, and the suite with their tasks."""
    if options.bundle:
        gate = of_bundle(options.bundle, backbone)
        return suite.ordered(gate.gate.tasks), [gate]
    suite = suite.in_order(options.order) if options.order else order_of(suite)
    return suite, [fitted(backbone, suite, seed, options.misses, options.gate_kind) for seed in options.seed]


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--suite", choices=NEAR_MISSES, default="demo")
    add("--order", nargs="+", help="default, random:SEED, or tasks (default: the order of the suite's preset)")
    add("--model", type=Path, default=CHECKPOINT, help="(default: the demo's)")
    add("--data", type=Path, help="the suite's data, made there if they are not (default: in the cache)")
    add("--seed", nargs="+", type=int, default=[0, 1, 2], help="a gate is fitted for each (default: 0 1 2)")
    add("--misses", type=float, help="of own questions (default: that of `fit_gate`)")
    add("--gate-kind", choices=get_args(Kind), help="(default: that of `fit_gate`)")
    add("--bundle", type=Path, metavar="FILE", help="measure the gate of this bundle; none is fitted")
    add("--tests", type=int, metavar="N", help="test questions of each task and of the base, at most (default: all)")
    add("--threads", type=int, default=0, help="of torch (default: its own choice)")
    add("--out", type=Path, metavar="FILE.json")
    return parser


if __name__ == "__main__":
    sys.exit(main())
