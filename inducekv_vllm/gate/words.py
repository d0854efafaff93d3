"""A question's words as numbers: how often it has each word, pair of words and part of a word, in hashed buckets.

Words tell which requests are a task's where the model's early layers do not, and the other way round. Nothing is
learned here but how common a bucket is among the questions that a gate was fitted to.

Shapes: N buckets, K tasks that the gate was fitted to.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from .odds import as_evidence

BUCKETS: Final = 8192
LETTERS: Final = range(2, 6)  # of a part of a word, which a space begins and ends
MOST_WORDS: Final = 400  # half of them from the beginning of a longer question, half from its end
CACHED: Final = 2**15  # words: most requests have words that others had
_WORD: Final = re.compile(r"\w+")
Buckets = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float32]


def word_counts(text: str) -> tuple[Buckets, Numbers]:
    """The buckets that a text has, ascending, and 1 + log(how often)."""
    words = _WORD.findall(text.lower())
    if len(words) > MOST_WORDS:
        words = words[: MOST_WORDS // 2] + words[-MOST_WORDS // 2 :]
    counts = Counter(itertools.chain(*map(_of_word, words), map(_of_pair, words, words[1:])))
    found = np.array(sorted(counts), dtype=np.int64)
    return found, 1 + np.log(np.array([counts[bucket] for bucket in found.tolist()], dtype=np.float32))


@lru_cache(CACHED)
def _of_word(word: str) -> tuple[int, ...]:
    """The buckets of the word and of its parts."""
    spaced = f" {word} "
    parts = [spaced[at : at + size] for size in LETTERS for at in range(len(spaced) - size + 1)]
    return tuple(_bucket(piece) for piece in (f"w {word}", *parts))


def _of_pair(first: str, second: str) -> int:
    return _bucket(f"w {first} {second}")


def _bucket(piece: str) -> int:
    return crc32(piece.encode()) % BUCKETS


def weighted(counts: Numbers, rarity: Numbers) -> Numbers:
    """Of norm 1; all 0 for a text without words."""
    found: Numbers = counts * rarity
    return found / max(float(np.linalg.norm(found)), float(np.finfo(np.float32).tiny))


@dataclass(frozen=True)
class WordScores:
    """The part of a gate that is applied to a question's text."""

    rarity: Numbers  # [N], above 0
    weights: Numbers  # [K, N]
    offsets: Numbers  # [K]

    def evidence(self, text: str) -> Numbers:
        """[K], from the log-odds of each task against none."""
        buckets, counts = word_counts(text)
        odds: Numbers = self.weights[:, buckets] @ weighted(counts, self.rarity[buckets]) + self.offsets
        return as_evidence(odds)
