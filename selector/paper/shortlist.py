"""Narrow the current task's candidates before the optimisation (paper, "Scalable Shortlist Selection").

Shapes: N current candidates, Q query keys of a minibatch, M candidates kept, d hidden size.
"""

from typing import Final

import faiss
import numpy as np
import torch
from torch import Tensor

QUERIES: Final = 256  # query keys that rank the candidates; drawn at random if a task has more


def nearest(keys: Tensor, queries: Tensor, count: int) -> Tensor:
    """The candidates most similar to a minibatch of query keys.

    Each query ranks the candidates by inner product. Candidates are taken by their best rank with any query; ties go to
    the more similar one, then to the first. A dense part of the task therefore cannot fill the shortlist alone.

    Args:
        keys: [N, d] float32, unit norm.
        queries: [Q, d] float32, unit norm.
        count: M.

    Returns:
        [min(M, N)] int64, increasing.
    """
    if count >= len(keys):
        return torch.arange(len(keys))
    index = faiss.IndexFlatIP(keys.shape[1])
    index.add(np.ascontiguousarray(keys.numpy(), dtype=np.float32))
    # `count` ranks of one query are enough to fill the shortlist.
    similarity, ranked = index.search(np.ascontiguousarray(queries.numpy(), dtype=np.float32), count)  # [Q, M] each
    rank = np.broadcast_to(np.arange(count), ranked.shape)
    order = np.lexsort((ranked.ravel(), -similarity.ravel(), rank.ravel()))
    candidates = ranked.ravel()[order]
    first = np.sort(np.unique(candidates, return_index=True)[1])[:count]  # the first place of each candidate
    return torch.from_numpy(np.sort(candidates[first]).astype(np.int64))
