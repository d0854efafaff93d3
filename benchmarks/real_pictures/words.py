"""The German words of what is drawn, from the installed package `emoji` (Unicode CLDR)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.real.items import fraction_of
from benchmarks.real.sources import ENGLISH, Packages
from benchmarks.real_pictures.concepts import Concept

LONGEST: Final = 12  # letters
NUMBER: Final = 24  # of words: each is a token or two of a small vocabulary


def german_words(concepts: Sequence[Concept], packages: Packages) -> dict[Concept, str]:
    """`NUMBER` of those whose name is one word in German too, and another one.

    Raises ConfigError: the package is missing.
    """
    translated = {emoji.names[ENGLISH]: emoji.names.get("de", "").lower() for emoji in packages.emoji}
    names = {concept.name for concept in concepts}
    found = {
        concept: word
        for concept in sorted(concepts, key=lambda concept: fraction_of(f"german {concept.name}"))
        if (word := translated.get(concept.name, "")).isalpha() and word not in names and len(word) <= LONGEST
    }
    unique = {word: concept for concept, word in found.items()}
    return {concept: word for word, concept in list(unique.items())[:NUMBER]}
