"""A question's words as numbers: how often it has each word, pair of words and part of a word, in hashed buckets.

All of its words are counted together, and those of every run of clauses.

Words tell which requests are a task's where the model's early layers do not, and the other way round. Nothing is
learned here but how common a bucket is among the questions that a gate was fitted to.

Shapes: N buckets, U of them that a text has, R runs of clauses, K tasks that the gate was fitted to.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from .clauses import BETWEEN, runs
from .odds import as_evidence, of_best_run

BUCKETS: Final = 8192
LETTERS: Final = range(2, 6)  # of a part of a word, which a space begins and ends
MOST_WORDS: Final = 400  # half of them from the beginning of a longer text, half from its end
CACHED: Final = 2**15  # words: most requests have words that others had
_WORD: Final = re.compile(r"\w+")
Buckets = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float32]


def run_counts(text: str) -> tuple[Buckets, Numbers]:
    """The buckets that a text has [U], ascending, and 1 + log(how often) [R, U]; 0 for what a run does not have.

    The first run is all of the text.
    """
    words, found = runs_of_words(text)
    pieces = [_of_word(word) for word in words]
    behind = np.cumsum([0, *map(len, pieces)])  # [n + 1], of the words' own, before those of pairs
    pieces += [_of_pair(*pair) for pair in pairwise(words)]
    buckets, places = np.unique(np.concatenate(pieces) if pieces else np.zeros(0, np.int64), return_inverse=True)
    own, pairs = places[: behind[-1]], places[behind[-1] :]
    counts = np.stack(
        [
            np.bincount(
                np.concatenate([own[behind[run.start] : behind[run.stop]], pairs[run.start : max(run.stop - 1, 0)]]),
                minlength=len(buckets),
            )
            for run in found
        ]
    )
    return buckets, np.where(counts, 1 + np.log(np.maximum(counts, 1)), 0).astype(np.float32)


def runs_of_words(text: str) -> tuple[list[str], list[range]]:
    """The words of a text in lower case, of a longer one those at either end, and its runs."""
    words, ends = list[str](), list[int]()
    for clause in BETWEEN.split(text.lower()):
        if found := _WORD.findall(clause):
            words += found
            ends.append(len(words))
    if len(words) > MOST_WORDS:
        gone = len(words) - MOST_WORDS
        words = words[: MOST_WORDS // 2] + words[-MOST_WORDS // 2 :]
        ends = sorted({min(end, MOST_WORDS // 2) if end < gone + MOST_WORDS // 2 else end - gone for end in ends})
    return words, list(runs(ends or [0]))


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
    """Counts [R, U] so that each run is of norm 1, or all 0 without words."""
    found: Numbers = counts * rarity
    norms: Numbers = np.linalg.norm(found, axis=1, keepdims=True)
    found /= np.maximum(norms, np.finfo(np.float32).tiny)
    return found


@dataclass(frozen=True)
class WordScores:
    """The part of a gate that is applied to a question's text."""

    rarity: Numbers  # [N], above 0
    weights: Numbers  # [K, N]
    offsets: Numbers  # [K]

    def evidence(self, text: str) -> Numbers:
        """[K], from the log-odds of each task against none: those of the run that has most."""
        buckets, counts = run_counts(text)
        odds = weighted(counts, self.rarity[buckets]) @ self.weights[:, buckets].T + self.offsets  # [R, K]
        return as_evidence(of_best_run(torch.from_numpy(odds)).numpy())
