"""From a query key to the numbers that inject memory: exact search, softmax weights, per-page terms.

Letters: B entries in the memory, k entries retrieved, m payload tokens of an entry, d hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import faiss
import numpy as np
import numpy.typing as npt

from .errors import ConfigError

Weighting = Literal["sqrt", "prior"]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Retrieval:
    """Entries by falling weight; entries of equal score stand in the order of the memory."""

    entries: IntArray  # [k]
    weights: FloatArray  # [k], alpha: sums to 1


@dataclass(frozen=True)
class PageTerms:
    """How each retrieved entry ("page") enters attention, for every layer l and every query token of the request:

        logit = key_scale * (q . k) * softmax_scale + log_weight + layer_bias_l
        value = value_scale * gate_l * v

    `log_remainder` is one more token, of logit `log_remainder + layer_bias_l` and value 0: all entries that were not
    retrieved, together. It is -inf where there is no such token.
    """

    entries: IntArray  # [k]
    key_scale: FloatArray  # [k]
    log_weight: FloatArray  # [k]
    value_scale: FloatArray  # [k]
    log_remainder: float = -math.inf


class PrefixIndex:
    """Exact inner-product search over a memory's retrieval keys."""

    def __init__(self, keys: npt.ArrayLike) -> None:
        """`keys` [B, d], unit norm, any float type.

        Raises:
            ConfigError: not a matrix of finite numbers with at least one row.
        """
        matrix = np.ascontiguousarray(np.asarray(keys), dtype=np.float32)  # [B, d]
        if matrix.ndim != 2 or 0 in matrix.shape or not np.isfinite(matrix).all():
            raise ConfigError(f"retrieval keys must be finite, of shape [B, d] with B, d >= 1; found {matrix.shape}")
        self.num_entries, self.hidden_size = matrix.shape
        self._index = faiss.IndexFlatIP(self.hidden_size)
        self._index.add(matrix)

    def search(
        self, query: npt.ArrayLike, temperature: float, top_k: int | None = None, among: IntArray | None = None
    ) -> Retrieval:
        """Retrieve for one query key.

        alpha_i = softmax_i(<query, key_i> / temperature) over all B entries, or over the `top_k` of highest score,
        renormalised (paper, Eq. alpha_rewrite). A `top_k` above B means all B. `among` stands for the whole memory.

        Args:
            query: [d] float32, unit norm.
            temperature: tau > 0.
            top_k: at least 1, or None for all B.
            among: the entries to choose from, at least one, or None for all B.

        Raises:
            ConfigError: a query of another shape or with NaN or inf, a temperature not above 0, a top_k below 1, or
                nothing to choose from.
        """
        q = np.ascontiguousarray(np.asarray(query), dtype=np.float32)  # [d]
        if q.shape != (self.hidden_size,) or not np.isfinite(q).all():
            raise ConfigError(
                f"the query key must be finite, of shape [{self.hidden_size}]; found shape {list(q.shape)}"
            )
        if not (math.isfinite(temperature) and temperature > 0):
            raise ConfigError(f"the temperature must be a positive number, found {temperature!r}")
        if top_k is not None and top_k < 1:
            raise ConfigError(f"top_k must be at least 1, found {top_k}")
        if among is not None and len(among) == 0:
            raise ConfigError("there must be at least one entry to choose from")

        # All B scores, although only k may be wanted: FAISS does not say which of several equal scores it keeps.
        scores, entries = self._index.search(q[None], self.num_entries)  # [1, B] f32, [1, B] i64
        order = np.lexsort((entries[0], -scores[0]))  # [B]
        if among is not None:
            order = order[np.isin(entries[0][order], among)]
        order = order[:top_k]  # [k]
        logits = scores[0][order].astype(np.float64) / temperature  # [k]
        weights = np.exp(logits - logits.max())
        return Retrieval(entries=entries[0][order], weights=(weights / weights.sum()).astype(np.float32))


def page_terms(
    retrieval: Retrieval,
    weighting: Weighting,
    *,
    payload_tokens: int,
    num_entries: int,
    remainder: bool = False,
) -> PageTerms:
    """Turn weights into the terms of injection.

    "sqrt" (the paper): key_scale = value_scale = sqrt(alpha), log_weight = 0.
    "prior": key_scale = value_scale = 1, log_weight = log(alpha); entries of weight 0 are dropped, for their log
    weight would be -inf.

    With `remainder` (weighting "sqrt" only) the B - k entries that were not retrieved stay in the softmax exactly as
    entries of alpha = 0 would: (B - k) m tokens of logit 0 and value 0, as one token of logit log((B - k) m).

    Args:
        retrieval: k entries and their weights.
        payload_tokens: m.
        num_entries: B.

    Raises:
        ConfigError: an unknown weighting, `remainder` without "sqrt", or entries and weights that do not belong to a
            memory of B entries.
    """
    entries, alpha = retrieval.entries, retrieval.weights  # [k], [k]
    if weighting not in ("sqrt", "prior"):
        raise ConfigError(f'the weighting must be "sqrt" or "prior", found {weighting!r}')
    if remainder and weighting != "sqrt":
        raise ConfigError('the zero-logit remainder exists for the weighting "sqrt" only')
    if payload_tokens < 1:
        raise ConfigError(f"payload_tokens must be at least 1, found {payload_tokens}")
    if entries.ndim != 1 or entries.shape != alpha.shape or not 1 <= len(entries) <= num_entries:
        raise ConfigError(
            f"expected k entries and k weights with 1 <= k <= {num_entries}, found {entries.shape} and {alpha.shape}"
        )
    if len(np.unique(entries)) != len(entries) or entries.min() < 0 or entries.max() >= num_entries:
        raise ConfigError(f"entries must be distinct numbers from 0 to {num_entries - 1}")
    if not np.isfinite(alpha).all() or (alpha < 0).any():
        raise ConfigError("retrieval weights must be finite and not negative")

    if weighting == "prior":
        used = alpha > 0
        ones = np.ones(int(used.sum()), dtype=np.float32)
        log_weight = np.log(alpha[used], dtype=np.float32)
        return PageTerms(entries=entries[used], key_scale=ones, log_weight=log_weight, value_scale=ones)

    scale = np.sqrt(alpha, dtype=np.float32)
    left_out = (num_entries - len(entries)) * payload_tokens
    return PageTerms(
        entries=entries,
        key_scale=scale,
        log_weight=np.zeros_like(scale),
        value_scale=scale,
        log_remainder=math.log(left_out) if remainder and left_out else -math.inf,
    )
