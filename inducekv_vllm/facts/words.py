"""The words of a question, as facts are found by them."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import Final

import numpy as np

from ..retrieval.entry_terms import FloatArray

# Chinese and Japanese put no spaces between words: there, each character is one. An emoji is all of its code points.
_UNSPACED: Final = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_PART: Final = rf"(?:(?![{_UNSPACED}])\w)+"
_HYPHENS: Final = str.maketrans("\u2010\u2011", "--")
_WORD: Final = re.compile(rf"[{_UNSPACED}]|{_PART}(?:-{_PART})*|[^\w\s\x00-\x7f]+|[^\w\s]")
_MEANT: Final = frozenset("#%&@*/")  # punctuation to Unicode, part of names and quantities to people


def words_of(text: str) -> tuple[str, ...]:
    """The different words, numbers, symbols and emoji of a text, in lower case and in order; "x-y" is one word."""
    found = dict.fromkeys(_WORD.findall(text.casefold().translate(_HYPHENS)))
    return tuple(word for word in found if not _is_punctuation(word))


def _is_punctuation(word: str) -> bool:
    return all(unicodedata.category(character)[0] == "P" and character not in _MEANT for character in word)


def own_direction(name: str, size: int) -> FloatArray:
    """A direction that follows from the name, [size] float32: all but orthogonal to those of other names."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    drawn = np.random.default_rng(seed).standard_normal(size).astype(np.float32)
    direction: FloatArray = drawn / np.linalg.norm(drawn)
    return direction
