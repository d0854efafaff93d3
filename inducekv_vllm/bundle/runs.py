"""Runs of adjacent numbers: what lies side by side is read, copied or overwritten at once."""

from __future__ import annotations

import itertools

import numpy as np

from ..retrieval.page_terms import IntArray


def runs_of(numbers: IntArray) -> list[tuple[int, int]]:
    """Where each run of adjacent numbers of [n] ascending ones begins and ends."""
    edges = np.flatnonzero(np.diff(numbers) != 1) + 1
    return list(itertools.pairwise([0, *edges.tolist(), len(numbers)])) if len(numbers) else []
