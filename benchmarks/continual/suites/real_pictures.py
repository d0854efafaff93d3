"""Questions about emoji as several vendors draw them: the tasks of `benchmarks.real_pictures.tasks`, in their order.

For the model that `python -m benchmarks.real_pictures.train` makes. The pictures are drawn once into a folder, and read
from there: other releases of the packages do not change a run that has begun.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.continual.suites.suite import Suite, TaskData
from benchmarks.data_folder import data_folder
from benchmarks.real.items import SPLITS
from benchmarks.real.records import BASE
from benchmarks.real.sources import Packages
from benchmarks.real_pictures.concepts import Concepts
from benchmarks.real_pictures.stream import BASE_SIZES, NAME, SEED, SIZES, Sizes, installed_concepts, write_task
from benchmarks.real_pictures.tasks import TASKS
from selector.data.examples import read_task


def load(
    data: Path,
    sizes: Sizes = SIZES,
    base_sizes: Sizes = BASE_SIZES,
    concepts: Concepts | None = None,
    packages: Packages | None = None,
) -> Suite:
    """The suite from the folder `data`; missing files are written first, from the packages (None: those installed).

    Raises ConfigError: a package or npm is missing, or the folder cannot be used: see `data_folder`.
    """
    names = (BASE, *TASKS)
    with data_folder(data, NAME, SEED):
        if not all((data / task / f"{split}.jsonl").exists() for task in names for split in SPLITS):
            concepts, packages = concepts or installed_concepts(), packages or Packages()
            for task in names:
                write_task(data / task, task, concepts, packages, base_sizes if task == BASE else sizes)
        tasks = {
            task: TaskData(task, **{split: tuple(read_task(data / task / f"{split}.jsonl")) for split in SPLITS})
            for task in names
        }
    base = tasks.pop(BASE)
    return Suite(NAME, tuple(tasks.values()), base)
