"""Examples kept for training on later tasks; inference does not need them."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.exemplars import content_bytes, number_that_fit
from selector.data.anchors import AnchorStore
from selector.data.choice import choose_anchors
from selector.data.examples import Example

ANCHORS = "anchors"


def earlier_anchors(previous: Path | None, out: Path) -> list[Example]:
    """The anchors of all earlier tasks, copied into the new state."""
    if previous is None:
        return []
    shutil.copytree(previous / ANCHORS, out / ANCHORS)
    return AnchorStore(out / ANCHORS).read()


def keep_anchors(task: str, training: Sequence[Example], out: Path, count: int, seed: int) -> int:
    """Adds the task's own anchors, drawn and stored as the selector draws and stores its own; returns bytes of all."""
    store = AnchorStore(out / ANCHORS)
    store.append(choose_anchors(training, count, seed))
    return store.bytes()


def reservoir(
    kept: Sequence[Example],
    new: Sequence[Example],
    allowed: int,
    seed: int,
    size: Callable[[Example], int] = content_bytes,
) -> list[Example]:
    """A uniform sample without replacement of a stream, from the sample so far and the new examples.

    Each example draws a number; those with the smallest numbers are kept while they fit into `allowed` bytes. This is
    a reservoir (Vitter, 1985) for examples of different sizes: the stream in a random order, as far as it fits. An
    example that fell out never comes back, since more and more examples come before it.
    """

    def draw(example: Example) -> bytes:
        return hashlib.sha256(f"{seed} {example.task} {example.id}".encode()).digest()

    order = sorted([*kept, *new], key=draw)
    return order[: number_that_fit(map(size, order), allowed)]


def store_buffer(folder: Path, buffer: Sequence[Example]) -> None:
    store = AnchorStore(folder)
    for task in sorted({example.task for example in buffer}):
        store.append([example for example in buffer if example.task == task])
