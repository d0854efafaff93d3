"""Writes the real-picture stream as task data.

One folder a task ("base" and every stream task), each with {train,validation,test}.jsonl and the pictures beside them.
Each split has vendors of its own. The npm packages are installed into the cache first, if they are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.demo.questions import pick
from benchmarks.demo.scenes import stable_hash
from benchmarks.demo.world import record_of, write_split
from benchmarks.real.items import BASE, SPLITS, Split
from benchmarks.real.model import cache_folder
from benchmarks.real.sources import Packages
from benchmarks.research.real_pictures.concepts import Concepts, concepts_of
from benchmarks.research.real_pictures.drawings import drawing, picture
from benchmarks.research.real_pictures.icons import install, read_all
from benchmarks.research.real_pictures.questions import FAMILIES
from benchmarks.research.real_pictures.tasks import TASKS
from inducekv_vllm.errors import ConfigError

NAME: Final = "real-pictures"  # of the suite
Sizes = dict[Split, int]
SIZES: Final[Sizes] = {"train": 256, "validation": 64, "test": 64}
BASE_SIZES: Final[Sizes] = {"train": 48, "validation": 24, "test": 48}  # multiples of three: families in equal shares
SEED: Final = 7


def examples(
    task: str, split: Split, number: int, concepts: Concepts, packages: Packages, seed: int = SEED
) -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """Of a task, or of the base questions, as (record, picture): every concept once, then every concept again.

    Raises ConfigError: a package is missing, or no concept is left for the split.
    """
    rng = np.random.default_rng([seed, stable_hash(task), SPLITS.index(split)])
    facts = None if task == BASE else TASKS[task].facts(concepts, packages)[split]
    asked = list(concepts.base if facts is None else facts)
    if not asked:
        raise ConfigError(f"{task}: the packages have no concept for the {split} questions")
    for index in range(number):
        if index % len(asked) == 0:
            order = rng.permutation(len(asked))
        concept = asked[order[index % len(asked)]]
        family = list(FAMILIES)[index % len(FAMILIES)] if facts is None else task
        question, answer = FAMILIES[family](rng, concept, concepts.base) if facts is None else facts[concept]
        pixels = picture(drawing(pick(rng, concepts.drawn_by(split, concept)), concept.name), rng)
        yield record_of(task, f"{split}_{index:05d}", family, question, answer) | {"concepts": [concept.name]}, pixels


def write_task(folder: Path, task: str, concepts: Concepts, packages: Packages, sizes: Sizes, seed: int = SEED) -> None:
    """The task's splits that are not in the folder yet. Raises ConfigError: see `examples`."""
    for split, number in sizes.items():
        if not (folder / f"{split}.jsonl").exists():
            write_split(folder, split, list(examples(task, split, number, concepts, packages, seed)))


def installed_concepts(cache: Path | None = None) -> Concepts:
    """Those of the npm packages in the cache, where they are installed first. Raises ConfigError: they cannot be."""
    install(cache or cache_folder())
    return concepts_of(read_all(cache or cache_folder()))
