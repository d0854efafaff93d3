"""A question's words as numbers: how often it has each word, pair of words and part of a word, in hashed buckets.

Words tell which requests are a task's where the model's early layers do not, and the other way round. Nothing is
learned here but how common a bucket is among the questions that a gate was fitted to.

Shapes: N buckets, K tasks that the gate was fitted to.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from zlib import crc32

import numpy as np
import numpy.typing as npt

from .odds import as_evidence

BUCKETS: Final = 8192
LETTERS: Final = range(2, 6)  # of a part of a word, which a space begins and ends
MOST_WORDS: Final = 400  # half of them from the beginning of a longer question, half from its end
_WORD: Final = re.compile(r"\w+")
Buckets = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float32]


def word_counts(text: str) -> tuple[Buckets, Numbers]:
    """The buckets that a text has, ascending, and 1 + log(how often)."""
    words = _WORD.findall(text.lower())
    if len(words) > MOST_WORDS:
        words = words[: MOST_WORDS // 2] + words[-MOST_WORDS // 2 :]
    counts = Counter(crc32(piece.encode()) % BUCKETS for piece in _pieces(words))
    found = np.array(sorted(counts), dtype=np.int64)
    return found, 1 + np.log(np.array([counts[bucket] for bucket in found.tolist()], dtype=np.float32))


def _pieces(words: list[str]) -> list[str]:
    pieces = [f"w {word}" for word in words]
    pieces += [f"w {first} {second}" for first, second in pairwise(words)]
    for word in words:
        spaced = f" {word} "
        pieces += [spaced[at : at + size] for size in LETTERS for at in range(len(spaced) - size + 1)]
    return pieces


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
