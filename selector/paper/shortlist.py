"""Narrow the current task's candidates before the optimisation (paper, "Scalable Shortlist Selection").

Letters: N current candidates, Q query keys of a minibatch, M candidates kept, d hidden size.
"""

from __future__ import annotations

from typing import Final

import faiss
import numpy as np
import torch
from torch import Tensor

# Query keys drawn for the ranking, where a task has more.
QUERIES: Final = 256


def nearest(keys: Tensor, queries: Tensor, count: int) -> Tensor:
    """The candidates most similar to a minibatch of query keys.

    Each query ranks the candidates by inner product; candidates are taken by their best rank with any query, of equal
    rank the more similar one, of equal similarity the one that stands first. So every query is served in turn, and a
    dense part of the task cannot fill the shortlist alone.

    Args:
        keys: [N, d] float32, unit norm.
        queries: [Q, d] float32, unit norm.
        count: M.

    Returns:
        [min(M, N)] int64, rising.
    """
    if count >= len(keys):
        return torch.arange(len(keys))
    index = faiss.IndexFlatIP(keys.shape[1])
    index.add(np.ascontiguousarray(keys.numpy(), dtype=np.float32))
    # `count` ranks of one query alone are enough to fill the shortlist.
    similarity, found = index.search(np.ascontiguousarray(queries.numpy(), dtype=np.float32), count)  # [Q, M] each
    rank = np.broadcast_to(np.arange(count), found.shape)
    order = np.lexsort((found.ravel(), -similarity.ravel(), rank.ravel()))
    candidates = found.ravel()[order]
    first = np.sort(np.unique(candidates, return_index=True)[1])[:count]  # where each candidate comes first
    return torch.from_numpy(np.sort(candidates[first]).astype(np.int64))


def at_random(num_candidates: int, count: int, seed: int) -> Tensor:
    """The control: `count` of N candidates, uniformly: [min(M, N)] int64, rising."""
    if count >= num_candidates:
        return torch.arange(num_candidates)
    chosen = np.random.default_rng((seed, 3)).choice(num_candidates, count, replace=False)
    return torch.from_numpy(np.sort(chosen).astype(np.int64))


def query_rows(num_questions: int, seed: int) -> list[int]:
    """Whose keys rank the candidates: all of up to 256 questions, else 256 drawn without repetition."""
    if num_questions <= QUERIES:
        return list(range(num_questions))
    chosen = np.random.default_rng((seed, 2)).choice(num_questions, QUERIES, replace=False)
    return sorted(chosen.tolist())
