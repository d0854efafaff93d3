"""The demo world: the tasks of `benchmarks.demo.streams`, in that module's order, and held-out base questions."""

from __future__ import annotations

from pathlib import Path

from benchmarks.continual.suites.suite import Suite, TaskData
from benchmarks.demo.streams import STREAMS
from benchmarks.demo.world import BASE, write_task
from selector.data.examples import read_task

SIZES = {"train": 512, "validation": 128, "test": 256}
BASE_SIZES = {"train": 504, "validation": 135, "test": 270}  # multiples of nine: the families in equal shares


def load(data: Path, sizes: dict[str, int] = SIZES, base_sizes: dict[str, int] = BASE_SIZES) -> Suite:
    """From the folder `data`; missing files are written first."""
    sizes_of = {name: base_sizes if name == BASE else sizes for name in (BASE, *STREAMS)}
    tasks = {}
    for name, split_sizes in sizes_of.items():
        folder = data / name
        if not all((folder / f"{split}.jsonl").exists() for split in split_sizes):
            write_task(folder, name, split_sizes)
        tasks[name] = TaskData(name, **{split: tuple(read_task(folder / f"{split}.jsonl")) for split in split_sizes})
    base = tasks.pop(BASE)
    return Suite("demo", tuple(tasks.values()), base)
