"""The demo world: the tasks of `benchmarks.demo.streams`, in that module's order, and held-out base questions.

A suite of its own has the tasks of `benchmarks.demo.search_streams`, on which settings are searched.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from benchmarks.continual.suites.suite import Suite, TaskData
from benchmarks.data_folder import data_folder
from benchmarks.demo.search_streams import SEARCH_STREAMS
from benchmarks.demo.streams import STREAMS
from benchmarks.demo.world import BASE, SEED, write_task
from selector.data.examples import read_task

SIZES = {"train": 512, "validation": 128, "test": 256}
BASE_SIZES = {"train": 504, "validation": 135, "test": 270}  # multiples of nine: the families in equal shares


def load(data: Path, sizes: dict[str, int] = SIZES, base_sizes: dict[str, int] = BASE_SIZES) -> Suite:
    """The reported tasks, from the folder `data`; missing files are written first.

    Raises ConfigError: they cannot be, or the folder has another suite's data.
    """
    return _suite("demo", STREAMS, data, sizes, base_sizes)


def load_search(data: Path, sizes: dict[str, int] = SIZES, base_sizes: dict[str, int] = BASE_SIZES) -> Suite:
    """The tasks of searches, likewise."""
    return _suite("demo-search", SEARCH_STREAMS, data, sizes, base_sizes)


def _suite(name: str, streams: Iterable[str], data: Path, sizes: dict[str, int], base_sizes: dict[str, int]) -> Suite:
    tasks = {}
    with data_folder(data, "demo", SEED):  # both suites have the same base questions
        for task in (BASE, *streams):
            folder, splits = data / task, base_sizes if task == BASE else sizes
            if not all((folder / f"{split}.jsonl").exists() for split in splits):
                write_task(folder, task, splits)
            tasks[task] = TaskData(task, **{split: tuple(read_task(folder / f"{split}.jsonl")) for split in splits})
    base = tasks.pop(BASE)
    return Suite(name, tuple(tasks.values()), base)
