"""The command for machines with a GPU: what it would run, and how it goes on where something fails or is missing."""

from __future__ import annotations

import json
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


def test_a_step_that_fails_or_is_left_out_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = [
        gpu.Step("failing", ("-c", "raise SystemExit(3)")),
        gpu.Step("elsewhere", ("-c", "raise SystemExit(3)"), ("no_such_package",)),
        gpu.Step("passing", ("-c", "")),
    ]
    monkeypatch.setattr(gpu, "steps", lambda *_: planned)
    monkeypatch.setattr(gpu, "describe_machine", lambda: {"gpu": "a GPU"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sys, "argv", ["gpu", "--results", str(tmp_path)])
    assert gpu.main() == 1
    summary = json.loads((tmp_path / "gpu.json").read_text())
    assert summary["machine"] == {"gpu": "a GPU"}
    failing, elsewhere, passing = summary["steps"]
    assert failing["exit_status"] == 3
    assert elsewhere["left_out"] == "not installed: no_such_package"
    assert passing["exit_status"] == 0
    assert [line.split()[0] for line in capsys.readouterr().err.splitlines()[-3:]] == ["failed", "left", "passed"]
    monkeypatch.setattr(sys, "argv", ["gpu", "--results", str(tmp_path), "--only", "pass"])
    assert gpu.main() == 0
    assert len(json.loads((tmp_path / "gpu.json").read_text())["steps"]) == 1
