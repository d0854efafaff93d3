"""Plain text as questions: the beginning of a paragraph is asked, and its rest is the answer.

Every other paragraph may be shown to a gate, as an example of what needs no memory; the perplexity is measured on the
others, which are written once beside a suite's tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.real.items import Item
from benchmarks.real.records import write_split
from benchmarks.real.sources import Packages

TEXT: Final = "text"  # its folder among those of the tasks
SHARE: Final = 1 / 3  # of a paragraph's words that stand in the question


def shown(packages: Packages) -> list[Item]:
    return begun(packages.passages[::2])


def held_out(packages: Packages) -> list[Item]:
    return begun(packages.passages[1::2])


def write_held_out(data: Path, packages: Packages) -> Path:
    """The file of a suite's held-out text, written if it is not there."""
    path = data / TEXT / "test.jsonl"
    if not path.exists():
        write_split(path, held_out(packages), TEXT)
    return path


def begun(passages: Sequence[str]) -> list[Item]:
    items = []
    for passage in passages:
        words = passage.split()
        at = max(1, int(SHARE * len(words)))
        items.append(Item((passage,), " ".join(words[:at]), " ".join(words[at:])))
    return items
