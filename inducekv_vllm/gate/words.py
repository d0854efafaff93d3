"""A question's words as numbers: how often it has each word, pair of words and part of a word, in hashed buckets.

All of its words are counted together, and those of every run of clauses.

Words tell which requests are a task's where the model's early layers do not, and the other way round. Nothing is
learned here but how common a bucket is among the questions that a gate was fitted to.

Shapes: N buckets, K tasks that the gate was fitted to.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from .clauses import clauses_of, runs
from .odds import as_evidence, of_best_run

BUCKETS: Final = 8192
LETTERS: Final = range(2, 6)  # of a part of a word, which a space begins and ends
MOST_WORDS: Final = 400  # half of them from the beginning of a longer question, half from its end
CACHED: Final = 2**15  # words: most requests have words that others had
_WORD: Final = re.compile(r"\w+")
Buckets = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float32]


def runs_of_words(text: str) -> Iterator[Sequence[str]]:
    """All words of a text in lower case, then those of each run of clauses."""
    words, ends = list[str](), list[int]()
    for clause in clauses_of(text.lower()):
        found = _WORD.findall(clause)
        words += found
        ends += [len(words)] if found else []
    for run in runs(ends or [0]):
        yield words[run.start : run.stop]


def word_counts(words: Sequence[str]) -> tuple[Buckets, Numbers]:
    """The buckets that words have, ascending, and 1 + log(how often)."""
    if len(words) > MOST_WORDS:
        words = [*words[: MOST_WORDS // 2], *words[-MOST_WORDS // 2 :]]
    pieces = [_of_word(word) for word in words] + [_of_pair(*pair) for pair in pairwise(words)]
    found, counts = np.unique(np.concatenate(pieces) if pieces else np.zeros(0, np.int64), return_counts=True)
    return found, 1 + np.log(counts.astype(np.float32))


@lru_cache(CACHED)
def _of_word(word: str) -> Buckets:
    """The buckets of the word and of its parts."""
    spaced = f" {word} "
    parts = [spaced[at : at + size] for size in LETTERS for at in range(len(spaced) - size + 1)]
    return np.array([_bucket(piece) for piece in (f"w {word}", *parts)])


@lru_cache(CACHED)
def _of_pair(first: str, second: str) -> Buckets:
    return np.array([_bucket(f"w {first} {second}")])


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
        """[K], from the log-odds of each task against none: those of the run that has most."""
        odds = np.stack([self._odds(words) for words in runs_of_words(text)])  # [R, K]
        return as_evidence(of_best_run(torch.from_numpy(odds)).numpy())

    def _odds(self, words: Sequence[str]) -> Numbers:
        buckets, counts = word_counts(words)
        odds: Numbers = self.weights[:, buckets] @ weighted(counts, self.rarity[buckets]) + self.offsets
        return odds
