"""Teaches SmolLM2 the demonstration's tasks, if that is not done: `python -m benchmarks.demo_real.teaching`.

The stream benchmark's own methods learn, into the cache of the model's folder, so that what was killed goes on.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.continual.jobs import prepare_process
from benchmarks.continual.methods import METHODS, Artifact, Method
from benchmarks.continual.methods.memory import BUNDLE
from benchmarks.continual.stream import Run, alone, claim, learn
from benchmarks.continual.suites import Suite
from benchmarks.continual.suites.real_text import load
from benchmarks.continual.tuned import apply_settings
from benchmarks.real.model import cache_folder, model_folder
from inducekv_vllm.errors import InduceKVError

TASKS: Final = ("valence", "airport", "language")
MEMORY, REPLAY = "refined_decoupled", "prompt_replay"
TITLES: Final = {MEMORY: "the memory", REPLAY: "PromptReplay"}
BUDGET: Final = 12  # entries of 8 tokens, for all tasks
TRAIN: Final = 128  # examples of each task
# Memory that acts on the answer alone trains the answer's tokens alone: minutes on one core.
SETTINGS: Final = {
    "steps": 100,
    "batch_size": 8,
    "precision": "float32",
    "learning_rate": 0.1,
    "activation": "generation",
}


@dataclass(frozen=True)
class Taught:
    """What the demonstration asks: the model, its questions, and the two methods' last states."""

    model: Path
    suite: Suite
    bundle: Path
    learned: Mapping[str, Artifact]  # of the memory, by task
    replay: Artifact
    replay_state: Path


def teach(cache: Path | None = None, model: Path | None = None, console: Console | None = None) -> Taught:
    """Learns what is not learned yet. Raises InduceKVError: a package is missing, or the cache is of other settings."""
    console = console or Console(stderr=True)
    model = model or model_folder(cache)
    folder = (cache or cache_folder()) / "demo-real"
    suite = load(folder / "data").ordered(TASKS)
    suite = suite.limited(TRAIN, len(suite.tasks[0].test), len(suite.base.test))
    claim(folder, "demo.json", {"data": suite.digest(), "tasks": TASKS, "budget": BUDGET, "train": TRAIN})
    prepare_process(threads=1)
    runs = [Run(suite, method, model, BUDGET, 0, folder) for method in methods()]
    if not all(run.state(number).exists() for run in runs for number in range(len(TASKS))):
        console.print(f"Teaching SmolLM2 once: what it learns is kept in {folder}, and goes on if it is stopped.")
    artifacts = {run.method.name: learned(run, console) for run in runs}
    memory, replay = (run.state(len(TASKS) - 1) for run in runs)
    return Taught(model, suite, memory / BUNDLE, artifacts[MEMORY], artifacts[REPLAY][TASKS[-1]], replay)


def learned(run: Run, console: Console) -> dict[str, Artifact]:
    """What one method made of each task. Raises ConfigError: another process is teaching it."""
    artifacts, numbers = {}, range(len(run.suite.tasks))
    with nullcontext() if all(run.state(number).exists() for number in numbers) else alone(run):
        for number, task in enumerate(run.suite.tasks):
            start, is_new = time.perf_counter(), not run.state(number).exists()
            if is_new:
                count = f"{number + 1} of {len(TASKS)}"
                console.print(f"{TITLES[run.method.name]}, task {count}: {task.name}, {len(task.train)} examples ...")
            artifacts[task.name] = learn(run, number)
            if is_new:
                console.print(f"  learned in {time.perf_counter() - start:.0f} s")
    return artifacts


def methods() -> tuple[Method, Method]:
    """The memory, and PromptReplay."""
    return apply_settings(METHODS[MEMORY], SETTINGS), METHODS[REPLAY]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="where it is kept (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        print(teach(options.cache).bundle)
    except InduceKVError as error:
        print(f"benchmarks.demo_real.teaching: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
