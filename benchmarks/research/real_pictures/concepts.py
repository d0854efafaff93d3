"""What is drawn: things with a name of one word that all vendors but `partial` packages have, half of them base.

Their German words are of the installed package `emoji` (Unicode CLDR).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.real.items import fraction_of
from benchmarks.real.sources import ENGLISH, Packages
from benchmarks.research.real_pictures.icons import Icons, Role

# A group's categories, by the vendors' names for them.
GROUPS: Final = {
    "nature": "Animals & Nature",
    "food": "Food & Drink",
    "object": "Objects",
    "travel": "Travel & Places",
}
# Drawn like another concept, or like what another name says: nobody could tell these apart.
_LEFT_OUT = """
bug camping chains cityscape cooking ewe fog foggy houses ledger link locked minibus ox ram rat sake sunrise sunset tram
trolleybus unlocked wedding
"""
LEFT_OUT: Final = frozenset(_LEFT_OUT.split())


@dataclass(frozen=True)
class Concept:
    name: str
    group: str


@dataclass(frozen=True)
class Concepts:
    """Of all packages: `base`, on which a model is trained, and `new`, of which it learns only later, if at all."""

    base: tuple[Concept, ...]
    new: tuple[Concept, ...]
    packages: Sequence[Icons]

    def drawn_by(self, role: Role, concept: Concept) -> list[Icons]:
        """The packages of that role that have the concept; at least one."""
        return [icons for icons in self.packages if icons.package.role == role and concept.name in icons.names]


def concepts_of(packages: Sequence[Icons]) -> Concepts:
    """Splits each group in half by a hash of the names."""
    shared = frozenset.intersection(*(icons.names for icons in packages if not icons.package.partial))
    categories = next(icons for icons in packages if icons.package.role == "test").categories
    base: list[Concept] = []
    new: list[Concept] = []
    for group, category in GROUPS.items():
        names = {name for name in categories[category] if name in shared and name.isalpha()} - LEFT_OUT
        ordered = sorted(names, key=lambda name: fraction_of(f"picture {name}"))
        half = (len(ordered) + 1) // 2
        base += [Concept(name, group) for name in ordered[:half]]
        new += [Concept(name, group) for name in ordered[half:]]
    return Concepts(tuple(base), tuple(new), packages)


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
