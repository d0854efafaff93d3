"""What one decoding step launches, by method: `python -m benchmarks.serving.steps [--model GEOMETRY]`.

Methods are those of `benchmarks.serving`: `none` is an engine without plugins, `idle` one with the plugin and no memory
in the step, and then memory behind a gate. torch's profiler counts over some steps the kernels and copies on the
device, their time, and the calls of the CUDA runtime. `step_ms` is the time of a step on the host, where it waits for
the device, without the profiler, and `prompt_ms` that of all steps of an answer of one token to a prompt that is new;
on a CPU only these are known.

The two engines have processes of their own, one after the other, and each method has a time limit. The file is complete
after every method, so a run that is cut off keeps what it has. It is `benchmarks/results/steps_MODEL_DTYPE.json`, or
`--output`. The last line is one JSON object. The exit status is 1 if a method has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Column, Table

from benchmarks.geometries import GEOMETRIES
from benchmarks.machine import describe_machine
from benchmarks.record import command, parser_of
from benchmarks.server_process import end_with_parent, reason_in
from benchmarks.serving.bundles import make_bundles
from benchmarks.serving.methods import IDLE, NONE, gated_name
from benchmarks.serving.model import make_folder, without_weights
from benchmarks.serving.step_record import StepRecord

RESULTS: Final = Path(__file__).parents[1] / "results"
ENGINE: Final = ("-m", "benchmarks.serving.step_engine")
KINDS: Final = ("closed", "same_pass", "generation", "prompt")
COLUMNS: Final = ("step_ms", "device_launches", "copies", "device_ms", "prompt_ms")  # of a row


def main() -> int:
    args = parse_arguments()
    deadline = time.monotonic() + args.budget
    record = StepRecord(args.output)
    with tempfile.TemporaryDirectory() as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        geometry = GEOMETRIES[args.model]
        model = make_folder(replace(geometry, layers=args.layers or geometry.layers), args.dtype, work / args.model)
        bundles = make_bundles(without_weights(model), [gated_name(kind) for kind in KINDS], work)
        record.begin(
            benchmark="steps",
            command=command(),
            **{name: getattr(args, name) for name in ("model", "layers", "dtype", "steps")},
            machine=describe_machine(),
        )
        for memories in ({NONE: None}, {IDLE: None, **bundles}):
            profile(memories, model, work / f"engine-{next(iter(memories))}.log", deadline - time.monotonic(), args)
    result = record.read()
    show(result["rows"], Console(width=None if sys.stdout.isatty() else 140))
    print(json.dumps(result))
    return int(any("failed" in row for rows in result["rows"].values() for row in rows.values()))


def profile(memories: dict[str, Path | None], model: Path, log: Path, seconds: float, args: argparse.Namespace) -> None:
    """Run the methods of one engine, which writes their rows; those that it has not come to get the reason."""
    is_plain = NONE in memories
    given = {name: getattr(args, name) for name in ("dtype", "requests", "steps", "limit")}
    paths = {name: None if path is None else str(path) for name, path in memories.items()}
    asked = given | {"model": str(model), "memories": paths, "plugin": not is_plain, "output": str(args.output)}
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CACHE_ROOT": str(log.with_suffix(""))}
    try:
        with log.open("wb") as output:
            ended = subprocess.run(
                [sys.executable, *ENGINE, json.dumps(asked)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment | ({"VLLM_PLUGINS": ""} if is_plain else {}),
                preexec_fn=partial(end_with_parent, signal.SIGKILL),
                timeout=max(seconds, 1.0),
            )
        why = f"the engine ended with exit status {ended.returncode}; from its log:\n{reason_in(log)}"
    except subprocess.TimeoutExpired:
        why = "the budget was spent"
    record = StepRecord(args.output)
    missing = {(name, n) for name in memories for n in args.requests} - record.measured()
    for name, n in sorted(missing):
        record.keep(name, n, {"failed": why})


def show(rows: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table("method", *(Column(each, justify="right") for each in ("requests", *COLUMNS)))
    for name, by_requests in rows.items():
        for n, row in by_requests.items():
            failed = row.get("failed", "").splitlines()[:1]
            table.add_row(name, n, *(failed or [str(row.get(column, "")) for column in COLUMNS]))
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", choices=sorted(GEOMETRIES), help="(default: qwen3-vl-4b on a GPU, 80m on a CPU)")
    add("--layers", type=int, help="a cut of it")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="(default: bfloat16 on a GPU, float32 on a CPU)")
    add("--requests", type=int, nargs="+", default=[1, 64], help="in a step")
    add("--steps", type=int, default=24, help="that are profiled")
    add("--limit", type=float, default=60.0, metavar="SECONDS", help="for one method with one number of requests")
    add("--budget", type=float, default=600.0, metavar="SECONDS", help="for all of it, starts included")
    add("--work", type=Path, help="a new folder that keeps model, bundles and logs")
    args = parser.parse_args()
    if min(*args.requests, args.steps, args.limit, args.budget) <= 0:
        parser.error("--requests, --steps, --limit and --budget must be positive")
    if args.work is not None and args.work.exists():
        parser.error(f"--work must be a new folder, found {args.work}")
    on_gpu = torch.cuda.is_available()
    args.model = args.model or ("qwen3-vl-4b" if on_gpu else "80m")
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    args.output = args.output or RESULTS / f"steps_{args.model}_{args.dtype}.json"
    return args


if __name__ == "__main__":
    sys.exit(main())
