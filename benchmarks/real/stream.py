"""Writes the real-data text stream as task data.

One folder a task ("base" and every stream task), each with {train,validation,test}.jsonl: what `inducekv-select` reads,
with the concepts that each question is about. Everything follows from the installed packages and the seed.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Final

from benchmarks.real.base import base_items
from benchmarks.real.items import BASE, SPLITS, Items, Split, write_split
from benchmarks.real.sources import Packages
from benchmarks.real.tasks import TASKS, cut
from inducekv_vllm.errors import ConfigError

NAME: Final = "real-text"  # of the suite
Sizes = dict[Split, int]
SIZES: Final[Sizes] = {"train": 256, "validation": 64, "test": 64}
BASE_SIZES: Final[Sizes] = {"train": 48, "validation": 24, "test": 48}
SEED: Final = 7


def items_of(task: str, packages: Packages, sizes: Sizes, seed: int = SEED) -> Items:
    """A task's splits, or those of the base questions. Raises ConfigError: a package is missing or holds too little."""
    rng = Random(f"{seed} {task}")
    if task == BASE:
        items = base_items(packages, sizes, rng)
    else:
        made = TASKS[task].items(packages, rng)
        items = cut(made, sizes, TASKS[task].split_by, rng)
    for split, size in sizes.items():
        if len(items[split]) < size:
            raise ConfigError(f"{task}: the packages hold {len(items[split])} {split} questions, expected {size}")
    return items


def write_task(folder: Path, task: str, packages: Packages, sizes: Sizes, seed: int = SEED) -> None:
    """The task's splits that are not in the folder yet. Raises ConfigError: see `items_of`."""
    if all((folder / f"{split}.jsonl").exists() for split in SPLITS):
        return
    items = items_of(task, packages, sizes, seed)
    for split in SPLITS:
        write_split(folder / f"{split}.jsonl", items[split], task)
