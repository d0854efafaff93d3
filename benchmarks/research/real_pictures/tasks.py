"""The tasks of the real-picture stream: what is asked about which concepts, in which split.

By item: every split asks about the same concepts, drawn by other vendors, so that what they look like must be learned.
By concept: the splits ask about other concepts too, so that a rule must be learned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.demo.questions import CODE_WORDS, Question
from benchmarks.real.items import SPLITS, Split, fraction_of, split_of
from benchmarks.real.sources import Packages
from benchmarks.research.real_pictures.concepts import GROUPS, Concept, Concepts, german_words
from benchmarks.research.real_pictures.questions import ONE_WORD

Facts = Mapping[Concept, Question]
NAMED, SHELVED = 12, 24  # concepts
# Disjoint sets of code words, each a word that the model can say.
NAMES, SHELVES, BOXES = CODE_WORDS[:NAMED], CODE_WORDS[12:16], CODE_WORDS[16:20]


@dataclass(frozen=True)
class PictureTask:
    """One task; `facts` gives what each split asks."""

    about: str
    split_by: Literal["concept", "item"]
    facts: Callable[[Concepts, Packages], dict[Split, Facts]]


def new_of(concepts: Concepts, group: str) -> list[Concept]:
    """Concepts of the group that the model was never taught, in an order of their own."""
    found = [concept for concept in concepts.new if concept.group == group]
    return sorted(found, key=lambda concept: fraction_of(f"task {concept.name}"))


def _names(concepts: Concepts, packages: Packages) -> dict[Split, Facts]:
    named = zip(new_of(concepts, "nature"), NAMES, strict=False)
    return in_every_split({concept: (f"What do we call this? {ONE_WORD}", code) for concept, code in named})


def _shelf(concepts: Concepts, packages: Packages) -> dict[Split, Facts]:
    shelved = new_of(concepts, "object")[:SHELVED]
    question = f"On which shelf does this belong? {ONE_WORD}"
    return in_every_split({concept: (question, SHELVES[n % len(SHELVES)]) for n, concept in enumerate(shelved)})


def _german(concepts: Concepts, packages: Packages) -> dict[Split, Facts]:
    words = german_words(concepts.base, packages)
    return in_every_split({concept: (f"What is this in German? {ONE_WORD}", word) for concept, word in words.items()})


def _box(concepts: Concepts, packages: Packages) -> dict[Split, Facts]:
    """The rule is the group; no concept of another task, and none in two splits."""
    free = {"nature": new_of(concepts, "nature")[NAMED:], "object": new_of(concepts, "object")[SHELVED:]}
    splits: dict[Split, dict[Concept, Question]] = {split: {} for split in SPLITS}
    for group, code in zip(GROUPS, BOXES, strict=True):
        for concept in free.get(group, new_of(concepts, group)):
            splits[split_of(f"box {concept.name}")][concept] = f"Into which box does this go? {ONE_WORD}", code
    return dict(splits)


def in_every_split(facts: Facts) -> dict[Split, Facts]:
    return dict.fromkeys(SPLITS, facts)


TASKS: Final[dict[str, PictureTask]] = {
    "names": PictureTask("new names of 12 new animals and plants", "item", _names),
    "shelf": PictureTask("an arbitrary property of 24 new objects", "item", _shelf),
    "german": PictureTask("German words for 24 known things", "item", _german),
    "box": PictureTask("a rule by group over new concepts", "concept", _box),
}
