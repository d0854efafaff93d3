"""Two tasks of the demo world, a few examples and two steps each: what the tests of the stream run on."""

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from benchmarks.research.continual.suites import Suite
from benchmarks.research.continual.suites.made import load_demo
from inducekv_vllm.bundle import Bundle, Gate

T = TypeVar("T")

SIZES = {"train": 12, "validation": 4, "test": 6}
BASE_SIZES = {"train": 9, "validation": 9, "test": 9}
ORDER = ("guild", "field")


def small_suite(data: Path) -> Suite:
    """From the folder `data`, written there if it is new."""
    return load_demo(data, SIZES, BASE_SIZES)


def command(data: Path, out: Path, *more: str) -> list[str]:
    """LoRA with replay, in this process; `more` may change any of it."""
    learning = ["--method", "lora_replay", "--set", "steps=2", "--set", "anchors_per_task=5"]
    return ["run", *places(data, out), *learning, "--answer", "offline", *more]


def places(data: Path, out: Path) -> list[str]:
    return ["--order", *ORDER, "--jobs", "1", "--data", str(data), "--out", str(out)]


def own_folder(out: Path, method: str = "lora_replay", seed: int = 0, budget: int = 32) -> Path:
    return out / method / f"budget-{budget}" / f"seed-{seed}"


@contextmanager
def killed_in_the_end(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """SIGKILL gives a process no chance to end what it has started."""
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(condition: Callable[[], T], process: subprocess.Popen[bytes], seconds: float = 400) -> T:
    """The first true value of the condition, which must come before the process ends."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return value


def gated(bundle: Bundle, gate: Gate) -> Bundle:
    """The bundle behind a gate."""
    fields = {name: getattr(bundle.metadata, name) for name in ("backbone", "budget", "entries", "weighting", "recipe")}
    return Bundle.create(**bundle.tensors(), **fields, settings={}, gate=gate)
