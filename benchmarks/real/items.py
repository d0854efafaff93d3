"""Questions about concepts, which split a concept belongs to, and their records as task data.

A split is drawn in one of two ways:

- by concept: what a question is about decides its split (`split_of`), so no word, country or emoji of a training
  question is asked about again, and remembering an answer does not help;
- by item: every split asks about the same items, each split in wordings of its own, so that remembering them is all
  that helps.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

from selector.data.examples import Example, read_task

Split = Literal["train", "validation", "test"]
SPLITS: Final[tuple[Split, ...]] = ("train", "validation", "test")
SHARES: Final = (0.6, 0.75)  # train ends at the first, validation at the second


@dataclass(frozen=True)
class Item:
    """A question with its answer; `concepts` are what it is about, `turns` the questions and answers before it."""

    concepts: tuple[str, ...]
    question: str
    answer: str
    turns: tuple[tuple[str, str], ...] = ()


Items = dict[Split, list[Item]]


def fraction_of(text: str) -> float:
    """A number in [0, 1) that follows from the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6]) / 2**48


def split_of(concept: str) -> Split:
    fraction = fraction_of(concept)
    return SPLITS[sum(fraction >= share for share in SHARES)]


def by_concept(items: Iterable[Item]) -> Items:
    """Each item in the split of its first concept."""
    splits: Items = {split: [] for split in SPLITS}
    for item in items:
        splits[split_of(item.concepts[0])].append(item)
    return splits


def by_item(
    facts: Mapping[str, str], wordings: Mapping[Split, Sequence[str]], count: int, rng: Random, closing: str
) -> Items:
    """`count` of the facts (what is asked about to the answer), in every split; each wording has the place "{}"."""
    asked = sorted(rng.sample(sorted(facts), min(count, len(facts))))
    rng.shuffle(asked)
    return {
        split: [
            Item((about,), f"{wording.format(about)} {closing}", facts[about])
            for wording in wordings[split]
            for about in asked
        ]
        for split in SPLITS
    }


def balanced(items: Sequence[Item], count: int, rng: Random) -> list[Item]:
    """At most `count` items in a random order: one of each answer in turn, while it has any left."""
    by_answer: dict[str, list[Item]] = defaultdict(list)
    for item in rng.sample(items, len(items)):
        by_answer[item.answer].append(item)
    turns = zip_longest(*by_answer.values())
    in_turn = [item for turn in turns for item in rng.sample(turn, len(turn)) if item is not None]
    return rng.sample(in_turn[:count], min(count, len(in_turn)))


BASE: Final = "base"
ROLES: Final = ("user", "assistant")


def record(item: Item, task: str, split: str, number: int) -> dict[str, Any]:
    turns = [{"role": role, "content": text} for turn in item.turns for role, text in zip(ROLES, turn, strict=True)]
    return {
        "id": f"{task}/{split}_{number:05d}",
        "task": task,
        "concepts": list(item.concepts),
        "messages": [*turns, {"role": "user", "content": item.question}],
        "answer": item.answer,
    }


def write_split(path: Path, items: Sequence[Item], task: str) -> None:
    """Writes the file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record(item, task, path.stem, number)) + "\n" for number, item in enumerate(items)]
    temporary = path.with_suffix(".jsonl.tmp")
    temporary.write_text("".join(lines), encoding="utf-8")
    os.replace(temporary, path)


def examples_of(items: Sequence[Item], task: str, split: str) -> list[Example]:
    """As they are read from a file of `write_split`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{split}.jsonl"
        write_split(path, items, task)
        return read_task(path)
