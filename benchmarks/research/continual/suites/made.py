"""Suites whose data are made: of the demo world, of what Python packages ship, and of what vendors draw.

The data are written once into a folder, and read from there: other releases of the packages do not change a run that
has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from benchmarks.data_folder import data_folder
from benchmarks.demo import world
from benchmarks.demo.streams import SEARCH_STREAMS, STREAMS
from benchmarks.demo.world import BASE, SPLITS
from benchmarks.real import stream as text
from benchmarks.real.sources import Packages
from benchmarks.real.tasks import TASKS as TEXT_TASKS
from benchmarks.research.continual.suites.suite import Suite, TaskData
from benchmarks.research.real_pictures import stream as pictures
from benchmarks.research.real_pictures.concepts import Concepts
from benchmarks.research.real_pictures.tasks import TASKS as PICTURE_TASKS
from selector.data.examples import read_task

Sizes = Mapping[str, int]
DEMO_SIZES = {"train": 512, "validation": 128, "test": 256}
DEMO_BASE_SIZES = {"train": 504, "validation": 135, "test": 270}  # multiples of nine: the families in equal shares


def load_demo(data: Path, sizes: Sizes = DEMO_SIZES, base_sizes: Sizes = DEMO_BASE_SIZES) -> Suite:
    """The reported tasks of `benchmarks.demo.streams`, in that module's order, and held-out base questions."""
    return _demo("demo", STREAMS, data, sizes, base_sizes)


def load_search(data: Path, sizes: Sizes = DEMO_SIZES, base_sizes: Sizes = DEMO_BASE_SIZES) -> Suite:
    """The tasks of `benchmarks.demo.streams`, on which settings are searched, likewise."""
    return _demo("demo-search", SEARCH_STREAMS, data, sizes, base_sizes)


def _demo(name: str, streams: Iterable[str], data: Path, sizes: Sizes, base_sizes: Sizes) -> Suite:
    def write(folder: Path, task: str, of_task: Sizes) -> None:
        world.write_task(folder, task, dict(of_task))

    with data_folder(data, "demo", world.SEED):  # both suites have the same base questions
        return _made(name, streams, data, sizes, base_sizes, write)


def load_real_text(
    data: Path,
    sizes: Sizes = text.SIZES,
    base_sizes: Sizes = text.BASE_SIZES,
    packages: Packages | None = None,
    seed: int = text.SEED,
) -> Suite:
    """Questions from data that Python packages ship (None: those installed), for a pretrained model.

    Raises ConfigError: a package is missing or holds too little, or the folder cannot be used: see `data_folder`.
    """
    packages = packages or Packages()

    def write(folder: Path, task: str, of_task: Sizes) -> None:
        text.write_task(folder, task, packages, dict(of_task), seed)

    with data_folder(data, text.NAME, seed):
        return _made(text.NAME, TEXT_TASKS, data, sizes, base_sizes, write)


def load_real_pictures(
    data: Path,
    sizes: Sizes = pictures.SIZES,
    base_sizes: Sizes = pictures.BASE_SIZES,
    concepts: Concepts | None = None,
    packages: Packages | None = None,
    seed: int = pictures.SEED,
) -> Suite:
    """Questions about emoji as vendors draw them, for the model of `python -m benchmarks.research.real_pictures.train`.

    Raises ConfigError: a package or npm is missing, or the folder cannot be used: see `data_folder`.
    """

    def write(folder: Path, task: str, of_task: Sizes) -> None:
        drawn, known = concepts or pictures.installed_concepts(), packages or Packages()
        pictures.write_task(folder, task, drawn, known, dict(of_task), seed)

    with data_folder(data, pictures.NAME, seed):
        return _made(pictures.NAME, PICTURE_TASKS, data, sizes, base_sizes, write)


def _made(
    name: str,
    tasks: Iterable[str],
    data: Path,
    sizes: Sizes,
    base_sizes: Sizes,
    write: Callable[[Path, str, Sizes], None],
) -> Suite:
    """The suite from the folder `data`; tasks that lack a split are written first."""
    found = {}
    for task in (BASE, *tasks):
        folder, of_task = data / task, base_sizes if task == BASE else sizes
        if not all((folder / f"{split}.jsonl").exists() for split in SPLITS):
            write(folder, task, of_task)
        found[task] = TaskData(task, **{split: tuple(read_task(folder / f"{split}.jsonl")) for split in SPLITS})
    base = found.pop(BASE)
    return Suite(name, tuple(found.values()), base)
