"""A document in pieces that the model reads one at a time, cut where paragraphs or sentences end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

from sentencex import segment

T = TypeVar("T")
PARAGRAPH: Final = re.compile(r".+?(?:\n\s*\n|\Z)", re.DOTALL)


def chunks_of(text: str, count: Callable[[str], int], most: int) -> list[str]:
    """Consecutive pieces that make up the text, but for blank lines at their ends.

    Args:
        count: how many tokens a text has.
        most: tokens of a piece; a sentence that has more is cut between words.
    """
    chunks, current = list[str](), ""
    for piece in _pieces(text, count, most):
        if current and count(current + piece) > most:
            chunks.append(current)
            current = ""
        current += piece
    return [chunk.strip("\n") for chunk in (*chunks, current) if chunk.strip()]


def sentences_of(text: str) -> list[str]:
    """Each in one line, however the document breaks its lines."""
    return [line for part in segment("en", text) if (line := " ".join(part.split()))]


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most so many of them, evenly."""
    return [items[at * len(items) // most] for at in range(most)] if len(items) > most else list(items)


def _pieces(text: str, count: Callable[[str], int], most: int) -> Iterator[str]:
    for paragraph in PARAGRAPH.findall(text):
        if count(paragraph) <= most:
            yield paragraph
            continue
        for sentence in segment("en", paragraph):
            yield from [sentence] if count(sentence) <= most else _cut(sentence, count, most)


def _cut(sentence: str, count: Callable[[str], int], most: int) -> Iterator[str]:
    current = ""
    for word in re.findall(r"\S+\s*|\s+", sentence):
        if current and count(current + word) > most:
            yield current
            current = ""
        current += word
    yield current
