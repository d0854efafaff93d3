"""Everything that only a GPU can show, in one command: `python -m benchmarks.gpu`, or `make gpu`.

It runs the kernels' tests (every variant), the kernels' benchmark for each model and dtype, the test of a training,
and, where vLLM is installed, the tests of a whole engine, the benchmark of three servers side by side and the profile
of a decoding step. It needs torch, triton, numpy, transformers and pytest; what needs more is left out by name. A step
that fails does not stop the others. JSON goes to `benchmarks/results/`; the summary, `gpu.json`, is written after each
step. Paths are relative to the repository. The exit status is 1 if a step has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.geometries import GEOMETRIES
from benchmarks.machine import describe_machine, installed_version
from benchmarks.record import parser_of

ROOT = Path(__file__).parents[1]
MODELS = ("qwen3-vl-4b", "llava-1.5-7b")
DTYPES = ("bfloat16", "float16")
SERVED = "qwen3-vl-4b"
SERVING_SECONDS = 600  # the servers' starts took 240 of them on the one GPU where they were seen
SELECTOR = ("faiss-cpu", "pydantic")
ENGINE = ("vllm", *SELECTOR)
# Left to itself vLLM's Triton attention rounds float32 products to TF32, too much for the tests' tolerance.
EXACT = {"TRITON_F32_DEFAULT": "ieee"}
# What serves memory without FlashAttention.
DECOUPLED = ("test_decoupled_prefix_cache", "test_decoupled", "test_facts", "test_facts_with_pictures")
EVERY_TEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow or not slow")


@dataclass(frozen=True)
class Step:
    name: str
    arguments: tuple[str, ...]  # of Python
    needs: tuple[str, ...] = ()  # distributions beyond those that the machine must have
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        return [package for package in self.needs if installed_version(package) is None]

    @property
    def command(self) -> str:
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), "python", *self.arguments])


def steps(models: Sequence[str], dtypes: Sequence[str], results: Path) -> list[Step]:
    """Tests first, then what is measured."""
    tests = [
        Step("kernel tests", (*EVERY_TEST, "tests/unit/inducekv_vllm/attention/kernels")),
        Step("device tests", (*EVERY_TEST, "tests/unit/inducekv_vllm/test_device.py"), ("psutil",)),
        Step("training tests", (*EVERY_TEST, "tests/unit/selector/refined/test_on_gpu.py"), SELECTOR),
        Step("engine tests", (*EVERY_TEST, "tests/engine/test_engine_on_gpu.py"), ENGINE),
        Step(
            "engine tests in float32", (*EVERY_TEST, *(f"tests/engine/{name}.py" for name in DECOUPLED)), ENGINE, EXACT
        ),
    ]
    measured = []
    for model in models:
        for dtype in dtypes:
            stem = f"kernels_{model}_{dtype}"
            benchmark = ("-m", "benchmarks.kernels.run", "--geometry", model, "--device", "cuda", "--dtype", dtype)
            measured.append(Step(f"{model} {dtype}", (*benchmark, "--output", str(results / f"{stem}.json"))))
    served = ("--model", SERVED, "--dtype", DTYPES[0], "--output")
    served_needs = (*ENGINE, "aiohttp", "peft")
    serving, steps_of = (str(results / f"{name}_{SERVED}_{DTYPES[0]}.json") for name in ("serving", "steps"))
    gated = ("--methods", "gated", "--budget", str(SERVING_SECONDS))
    measured.append(Step("serving", ("-m", "benchmarks.serving.run", *served, serving, *gated), served_needs))
    measured.append(Step("decoding steps", ("-m", "benchmarks.serving.steps", *served, steps_of), served_needs))
    return tests + measured


def run(planned: Sequence[Step], results: Path) -> list[dict[str, Any]]:
    """Run the steps one after the other, and keep the summary up to date."""
    summary = ROOT / results / "gpu.json"
    summary.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for step in planned:
        row: dict[str, Any] = {"step": step.name, "command": step.command}
        tell(f"== {step.name}: {step.command}")
        if step.missing:
            row["left_out"] = f"not installed: {', '.join(step.missing)}"
            tell(f"   left out: {row['left_out']}")
        else:
            started = time.monotonic()
            command, environment = [sys.executable, *step.arguments], os.environ | step.environment
            row["exit_status"] = subprocess.run(command, cwd=ROOT, env=environment).returncode
            row["seconds"] = round(time.monotonic() - started, 1)
        rows.append(row)
        summary.write_text(json.dumps({"machine": describe_machine(), "steps": rows}, indent=2) + "\n")
    return rows


def main() -> int:
    args = parse_arguments()
    planned = [
        step
        for step in steps(args.models, args.dtypes, args.results)
        if any(step.name.startswith(chosen) for chosen in args.only or [""])
    ]
    if args.dry_run:
        for step in planned:
            missing = ", ".join(step.missing)
            print(step.command + (f"  # left out here, not installed: {missing}" if missing else ""))
        return 0
    rows = run(planned, args.results)
    for row in rows:
        tell(f"{outcome(row):10} {row.get('seconds', 0):7.1f} s  {row['step']}")
    return int(any(row.get("exit_status") for row in rows))


def outcome(row: dict[str, Any]) -> str:
    if "left_out" in row:
        return "left out"
    return "failed" if row["exit_status"] else "passed"


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__, has_result=False)
    parser.add_argument("--dry-run", action="store_true", help="print the commands, and run none")
    parser.add_argument("--models", nargs="+", choices=sorted(GEOMETRIES), default=MODELS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--only", action="append", metavar="STEP", help="steps whose names begin with this; repeatable")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="where files go")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and PyTorch finds none; --dry-run prints what would run")
    return args


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
