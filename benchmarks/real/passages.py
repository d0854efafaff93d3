"""Plain text as questions: the beginning of a paragraph is asked, and its rest is the answer.

Every other paragraph may be shown to a gate, as an example of what needs no memory; the others are shown to none.
"""

from __future__ import annotations

from typing import Final

from benchmarks.real.items import Item
from benchmarks.real.sources import Packages

SHARE: Final = 1 / 3  # of a paragraph's words that stand in the question


def shown(packages: Packages) -> list[Item]:
    items = []
    for passage in packages.passages[::2]:
        words = passage.split()
        at = max(1, int(SHARE * len(words)))
        items.append(Item((passage,), " ".join(words[:at]), " ".join(words[at:])))
    return items
