"""A real model with a memory of three real-data tasks: what `run_demo --real MODEL` shows.

`inducekv-select` teaches it once, into the cache of converted models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks.data_folder import data_folder
from benchmarks.real.items import BASE
from benchmarks.real.sources import Packages
from benchmarks.real.stream import BASE_SIZES, NAME, SEED, SIZES, Sizes, write_task
from inducekv_vllm.errors import ConfigError
from selector.cli.select import main as select

TASKS: Final = ("valence", "airport", "language")
# Memory that acts on the answer alone trains the answer's tokens alone: minutes on one core.
SETTINGS: Final = ("--steps=100", "--batch-size=8", "--learning-rate=0.1", "--activation=generation")
# vLLM's CPU attention wants blocks of a multiple of 32 tokens.
SERVING: Final = ("--block-size", "32", "--enforce-eager", "--max-model-len", "2048")


def teach(folder: Path, model: Path, console: Console, packages: Packages | None = None, sizes: Sizes = SIZES) -> Path:
    """The memory of all tasks, in `folder`; what was stopped goes on. Raises ConfigError: a task was refused."""
    data, packages = folder / "data", packages or Packages()
    with data_folder(data, NAME, SEED):
        for task in (BASE, *TASKS):
            write_task(data / task, task, packages, BASE_SIZES if task == BASE else sizes)
    previous: Path | None = None
    for number, task in enumerate(TASKS):
        bundle = folder / f"{number}-{task}.safetensors"
        if not bundle.exists():
            console.print(f"teaching {model.name} task {number + 1} of {len(TASKS)}, {task}: kept in {folder}")
            command = ["--model", str(model), "--anchors", str(folder / "anchors"), "--output", str(bundle)]
            command += ["--task", str(data / task / "train.jsonl"), "--base", str(data / BASE / "train.jsonl")]
            command += ["--validation", str(data / task / "validation.jsonl"), *SETTINGS]
            command += ["--previous", str(previous)] if previous else []
            if select(command) != 0:
                raise ConfigError(f"{task} was not taught: see above")
        previous = bundle
    assert previous is not None
    return previous
