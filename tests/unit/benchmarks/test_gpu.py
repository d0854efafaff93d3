"""The command for machines with a GPU would run every check and benchmark, with options that they know."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmarks.kernels.run
import benchmarks.serving.run
import benchmarks.serving.steps
from benchmarks import gpu

ROOT = Path(__file__).parents[3]
PARSERS = {
    "benchmarks.kernels.run": benchmarks.kernels.run.parse_arguments,
    "benchmarks.serving.run": benchmarks.serving.run.parse_arguments,
    "benchmarks.serving.steps": benchmarks.serving.steps.parse_arguments,
}


def test_make_gpu_would_run_every_check_and_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["make", "--silent", "gpu", f"PYTHON={sys.executable}", "GPU_ARGS=--dry-run"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    planned = gpu.steps(gpu.MODELS, gpu.DTYPES, Path("benchmarks/results"))
    assert [line.partition("  #")[0] for line in ran.stdout.splitlines()] == [step.command for step in planned]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    measured = []
    for step in planned:
        if step.arguments[1] == "pytest":
            assert all((ROOT / argument).exists() for argument in step.arguments if argument.startswith("tests/"))
        else:
            monkeypatch.setattr(sys, "argv", list(step.arguments[1:]))
            measured.append(PARSERS[step.arguments[1]]())
    *of_kernels, serving, decoding = measured
    kernels = [(args.geometry, args.dtype) for args in of_kernels]
    assert kernels == [(model, dtype) for model in gpu.MODELS for dtype in gpu.DTYPES]
    assert {(args.model, args.dtype) for args in (serving, decoding)} == {("qwen3-vl-4b", "bfloat16")}
    assert list(serving.servers) == ["plain", "plugin", "lora"]
    assert {args.output.parent for args in (serving, decoding)} == {Path("benchmarks/results")}
    assert {"qwen3-vl-4b", "llava-1.5-7b"} == set(gpu.MODELS)
