"""What makes vLLM's CPU worker grow: oneDNN's cache of primitives, here without any server.

    python -m benchmarks.churn.primitives

vLLM's linear layers ask oneDNN for a compiled kernel (a *primitive*) for each number of tokens that a step has. oneDNN
keeps the last 1024 of a process, or as many as ONEDNN_PRIMITIVE_CACHE_CAPACITY says. This takes the linear layers of a
small model through steps of every length, twice, with both sizes of the cache: each in a process of its own, because
oneDNN reads the variable once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from typing import Any

import psutil
import torch

import inducekv_vllm.attention.backend  # noqa: F401  loads vLLM's compiled operators
from benchmarks.machine import describe_machine

from .run import FEW_PRIMITIVES

WEIGHTS = ((768, 256), (256, 256), (1280, 256), (256, 640))  # [out, in]: the sizes of a small model
TOKENS = 400  # of the longest step; 1600 primitives in all
KEPT_BY_VLLM = 32  # primitives for each shape of weights, as vLLM's linear layers ask for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure in this process, with its environment")
    if parser.parse_args().measure:
        print(json.dumps(measure()))
        return
    usual, few = (measured_in_a_process(variables) for variables in ({}, FEW_PRIMITIVES))
    result = {
        "benchmark": "churn-primitives",
        "command": "python -m benchmarks.churn.primitives",
        "steps_of_a_round": TOKENS,
        "primitives_of_a_round": TOKENS * len(WEIGHTS),
        "usual": usual,
        "few": {**FEW_PRIMITIVES, **few},
        "same_results": usual["sha256"] == few["sha256"],
        "machine": describe_machine(),
    }
    print(json.dumps(result, indent=2))


def measured_in_a_process(variables: dict[str, str]) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if name not in FEW_PRIMITIVES}
    command = [sys.executable, "-m", "benchmarks.churn.primitives", "--measure"]
    done = subprocess.run(command, env=environment | variables, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure() -> dict[str, Any]:
    """Grown MiB after each quarter of each round, CPU seconds of each round, and a digest of all results."""
    generator = torch.Generator().manual_seed(0)
    layers = [linear(torch.randn(shape, generator=generator)) for shape in WEIGHTS]
    rows = torch.randn(TOKENS, max(inputs for _, inputs in WEIGHTS), generator=generator)
    digest, before = hashlib.sha256(), resident_mib()
    grown, cpu_s = [], []
    for _ in range(2):
        began = time.process_time()
        for tokens in range(1, TOKENS + 1):
            for (outputs, inputs), handler in zip(WEIGHTS, layers, strict=True):
                result = torch.empty(tokens, outputs)
                torch.ops._C.onednn_mm(result, rows[:tokens, :inputs].contiguous(), None, handler)
                digest.update(result.numpy().tobytes())
            if tokens % (TOKENS // 4) == 0:
                grown.append(round(resident_mib() - before, 1))
        cpu_s.append(round(time.process_time() - began, 2))
    return {"grown_mib": grown, "cpu_s": cpu_s, "sha256": digest.hexdigest()}


def linear(weight: torch.Tensor) -> torch.Tensor:
    """vLLM's handle of a linear layer; weight: [out, in] float32."""
    return torch.tensor(torch.ops._C.create_onednn_mm_handler(weight.t(), KEPT_BY_VLLM), dtype=torch.int64)


def resident_mib() -> float:
    return float(psutil.Process().memory_info().rss) / 2**20


if __name__ == "__main__":
    main()
