"""Two tasks of the demo world, a few examples and two steps each: what the tests of the stream run on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks.continual.suites import Suite
from benchmarks.continual.suites.demo import load
from inducekv_vllm.bundle import Bundle, Gate

SIZES = {"train": 12, "validation": 4, "test": 6}
BASE_SIZES = {"train": 9, "validation": 9, "test": 9}
ORDER = ("guild", "field")


def small_suite(data: Path) -> Suite:
    """From the folder `data`, written there if it is new."""
    return load(data, SIZES, BASE_SIZES)


def command(data: Path, out: Path, *more: str) -> list[str]:
    """LoRA with replay, in this process; `more` may change any of it."""
    learning = ["--method", "lora_replay", "--set", "steps=2", "--set", "anchors_per_task=5"]
    return ["run", *places(data, out), *learning, "--answer", "offline", *more]


def untouched(data: Path, out: Path, endpoint: str, *more: str) -> list[str]:
    """The model as it is, at an endpoint."""
    return ["run", *places(data, out), "--method", "no_memory", "--endpoint", endpoint, *more]


def places(data: Path, out: Path) -> list[str]:
    return ["--order", *ORDER, "--jobs", "1", "--data", str(data), "--out", str(out)]


def own_folder(out: Path, method: str = "lora_replay", seed: int = 0, budget: int = 32) -> Path:
    return out / method / f"budget-{budget}" / f"seed-{seed}"


def gated(bundle: Bundle, gate: Gate) -> Bundle:
    """The bundle behind another gate."""
    metadata = bundle.metadata.model_copy(update={"format_version": 2, "gate_tasks": gate.tasks})
    return replace(bundle, gate_keys=gate.keys.half(), gate_thresholds=gate.thresholds, metadata=metadata)
