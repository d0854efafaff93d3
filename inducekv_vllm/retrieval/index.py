"""Exact search for the entries of a memory that are closest to a query key.

Shapes: B entries in the memory, k entries retrieved, d hidden size.
"""

import faiss
import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from .entry_terms import IntArray, Retrieval


class KeyIndex:
    """Exact inner-product search over a memory's retrieval keys."""

    def __init__(self, keys: npt.ArrayLike) -> None:
        """`keys` [B, d], at least one, of unit norm, any float type."""
        matrix = np.ascontiguousarray(keys, dtype=np.float32)  # [B, d]
        self.num_entries, self.hidden_size = matrix.shape
        self._index = faiss.IndexFlatIP(self.hidden_size)
        self._index.add(matrix)

    def search(
        self, query: npt.ArrayLike, temperature: float, top_k: int | None = None, among: IntArray | None = None
    ) -> Retrieval:
        """Retrieve entries for one query key.

        alpha_i = softmax_i(<query, key_i> / temperature) over all B entries, or over the `top_k` with the highest
        scores, renormalised (paper, Eq. alpha_rewrite). A `top_k` above B means all B.

        Args:
            query: [d] float32, unit norm.
            temperature: tau > 0.
            top_k: at least 1, or None for all B.
            among: restricts the search to these entries, at least one; None for all B.

        Raises:
            ConfigError: the query is not finite.
        """
        q = np.ascontiguousarray(np.asarray(query), dtype=np.float32)  # [d]
        if not np.isfinite(q).all():
            raise ConfigError("the query key must be finite")

        # Score all B entries even for a small k: FAISS does not define which of several equal scores it keeps.
        scores, entries = self._index.search(q[None], self.num_entries)  # [1, B] f32, [1, B] i64
        order = np.lexsort((entries[0], -scores[0]))  # [B]
        if among is not None:
            order = order[np.isin(entries[0][order], among)]
        order = order[:top_k]  # [k]
        logits = scores[0][order].astype(np.float64) / temperature  # [k]
        weights = np.exp(logits - logits.max())
        return Retrieval(
            entries=entries[0][order],
            weights=(weights / weights.sum()).astype(np.float32),
            similarity=float(scores[0][order[0]]),
        )
