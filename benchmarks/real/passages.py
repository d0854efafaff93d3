"""Plain text as questions: the beginning of a paragraph is asked, and its rest is the answer.

Every other paragraph may be shown to a gate, as an example of what needs no memory; the perplexity is measured on the
others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.real.items import Item
from benchmarks.real.sources import Packages

SHARE: Final = 1 / 3  # of a paragraph's words that stand in the question


def shown(packages: Packages) -> list[Item]:
    return begun(packages.passages[::2])


def held_out(packages: Packages) -> list[Item]:
    return begun(packages.passages[1::2])


def begun(passages: Sequence[str]) -> list[Item]:
    items = []
    for passage in passages:
        words = passage.split()
        at = max(1, int(SHARE * len(words)))
        items.append(Item((passage,), " ".join(words[:at]), " ".join(words[at:])))
    return items
