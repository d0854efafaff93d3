"""The base families: what the model is trained to answer, about concepts that are base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from benchmarks.demo.questions import CODE_WORDS, Question, pick
from benchmarks.real.sources import Packages
from benchmarks.research.real_pictures.concepts import GROUPS, Concept, german_words

ONE_WORD: Final = "Answer with one word."
YES_NO: Final = "Answer yes or no."
OPTIONS: Final = ", ".join(list(GROUPS)[:-1]) + f" or {list(GROUPS)[-1]}"


def name(rng: np.random.Generator, concept: Concept, base: Sequence[Concept]) -> Question:
    question = pick(rng, ("What is this?", "What does the picture show?", "Name this."))
    return pick(rng, (question, f"{question} {ONE_WORD}")), concept.name


def group(rng: np.random.Generator, concept: Concept, base: Sequence[Concept]) -> Question:
    question = pick(rng, ("What kind of thing is this?", "What group is this of?"))
    return pick(rng, (question, f"{question} {ONE_WORD}", f"Is this {OPTIONS}? {ONE_WORD}")), concept.group


def claim(rng: np.random.Generator, concept: Concept, base: Sequence[Concept]) -> Question:
    """Half are true; half of the others name a concept of the same group."""
    true = rng.random() < 0.5
    if rng.random() < 0.25:
        claimed = concept.group if true else pick(rng, [other for other in GROUPS if other != concept.group])
    else:
        near = rng.random() < 0.5
        others = [c for c in base if c != concept and (c.group == concept.group or not near)]
        claimed = (concept if true else pick(rng, others)).name
    question = pick(rng, ("Is this {}?", "Does the picture show {}?")).format(claimed)
    return f"{question} {YES_NO}", "yes" if true else "no"


FAMILIES: Final[dict[str, Callable[[np.random.Generator, Concept, Sequence[Concept]], Question]]] = {
    "name": name,
    "group": group,
    "claim": claim,
}
COPY: Final = "copy"  # trained beside them, and not measured: it needs no picture


def vocabulary(base: Sequence[Concept], packages: Packages) -> list[str]:
    """Every word that an answer may have. That they can be said is taught; what tasks use them for is not."""
    names = {concept.name for concept in base} | set(GROUPS)
    return sorted({*names, *CODE_WORDS, *german_words(base, packages).values(), "yes", "no"})


def copy(rng: np.random.Generator, words: Sequence[str]) -> Question:
    text = " ".join(pick(rng, words) for _ in range(pick(rng, (1, 1, 2))))
    return pick(rng, ('Say "{}".', "Say {}", "Repeat the words {}")).format(text), text
