"""Questions from data that Python packages ship: the tasks of `benchmarks.real.tasks`, in that module's order.

For a pretrained model, as `python -m benchmarks.real.model` makes one. The data are written once into a folder, and
read from there: other releases of the packages do not change a run that has begun.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.continual.suites.suite import Suite, TaskData
from benchmarks.data_folder import data_folder
from benchmarks.real.records import BASE
from benchmarks.real.sources import Packages
from benchmarks.real.stream import BASE_SIZES, NAME, SEED, SIZES, Sizes, write_task
from benchmarks.real.tasks import TASKS
from selector.data.examples import read_task


def load(data: Path, sizes: Sizes = SIZES, base_sizes: Sizes = BASE_SIZES, packages: Packages | None = None) -> Suite:
    """The suite from the folder `data`; missing files are written first, from the packages (None: those installed).

    Raises ConfigError: a package is missing or holds too little, or the folder cannot be used: see `data_folder`.
    """
    packages = packages or Packages()
    tasks = {}
    with data_folder(data, NAME, SEED):
        for task in (BASE, *TASKS):
            folder, splits = data / task, base_sizes if task == BASE else sizes
            write_task(folder, task, packages, splits)
            tasks[task] = TaskData(task, **{split: tuple(read_task(folder / f"{split}.jsonl")) for split in splits})
    base = tasks.pop(BASE)
    return Suite(NAME, tuple(tasks.values()), base)
