"""Plain text as questions: the beginning of a paragraph is asked, and its rest is the answer.

Every other paragraph may be shown to a gate, as an example of what needs no memory; the perplexity is measured on the
others, which are written once beside a suite's tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.real.items import Item
from benchmarks.real.records import examples_of, write_split
from benchmarks.real.sources import Packages
from selector.data.examples import Example, read_task

TEXT: Final = "text"  # its folder among those of the tasks
SHARE: Final = 1 / 3  # of a paragraph's words that stand in the question


def shown(packages: Packages) -> list[Item]:
    return begun(packages.passages[::2])


def held_out(packages: Packages) -> list[Item]:
    return begun(packages.passages[1::2])


def write_held_out(data: Path, packages: Packages) -> None:
    """Written beside a suite's tasks: other releases of the package may have other text."""
    write_split(data / TEXT / "test.jsonl", held_out(packages), TEXT)


def read_held_out(data: Path) -> list[Example]:
    """Of a suite's data; from the installed package where these are older, or of a suite without text."""
    path = data / TEXT / "test.jsonl"
    return read_task(path) if path.exists() else examples_of(held_out(Packages()), TEXT, "test")


def begun(passages: Sequence[str]) -> list[Item]:
    items = []
    for passage in passages:
        words = passage.split()
        at = max(1, int(SHARE * len(words)))
        items.append(Item((passage,), " ".join(words[:at]), " ".join(words[at:])))
    return items
