"""How retrieved entries enter attention: the numbers for each of them, from the retrieval weights.

Shapes: B entries in the memory, k entries retrieved, m payload tokens of an entry.

This module needs neither FAISS nor vLLM, because the bundle file format depends on it.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

MergedWeighting = Literal["sqrt", "prior"]
Weighting = Literal["sqrt", "prior", "uniform"]
# "merged" (the paper): one softmax over [memory ; self]. "decoupled": memory has a softmax of its own with one token of
# logit 0 and value 0, and its output is added to that of self-attention.
Form = Literal["merged", "decoupled"]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Retrieval:
    """Entries in order of decreasing weight; entries with equal scores keep the order of the memory."""

    entries: IntArray  # [k]
    weights: FloatArray  # [k], alpha: sums to 1; in "uniform" weighting each is 1
    similarity: float | None = None  # inner product of the query and the closest entry's key, if they were compared


@dataclass(frozen=True)
class EntryTerms:
    """How each retrieved entry enters attention, for every layer l and every active query token:

        logit = key_scale * (q . k) * softmax_scale + log_weight + layer_bias_l
        value = value_scale * gate_l * v

        merged:     output = softmax([logits ; self logits]) [values ; self values]
        decoupled:  output = self output + softmax([logits ; 0]) [values ; 0]

    `log_remainder` adds one token with logit `log_remainder + layer_bias_l` and value 0, which stands for all entries
    that were not retrieved. It is -inf if there is no such token.
    """

    entries: IntArray  # [k]
    key_scale: FloatArray  # [k]
    log_weight: FloatArray  # [k]
    value_scale: FloatArray  # [k]
    log_remainder: float = -math.inf

    @property
    def are_neutral(self) -> bool:
        """Whether all tokens count alike, with the keys and values that are stored."""
        return bool((self.key_scale == 1).all() and (self.log_weight == 0).all() and (self.value_scale == 1).all())


def entry_terms(
    retrieval: Retrieval,
    weighting: Weighting,
    *,
    payload_tokens: int,
    num_entries: int,
    num_expired: int = 0,
    remainder: bool = False,
) -> EntryTerms:
    """Turn retrieval weights into injection terms.

    "sqrt" (the paper): key_scale = value_scale = sqrt(alpha), log_weight = 0.
    "prior": key_scale = value_scale = 1, log_weight = log(alpha). Entries with weight 0 are dropped, because their log
    weight would be -inf.
    "uniform": key_scale = value_scale = 1, log_weight = 0: every retrieved entry counts alike, whatever its weight.

    With `remainder` (weighting "sqrt" only), the B - k entries that were not retrieved stay in the softmax as entries
    with alpha = 0: (B - k) m tokens with logit 0 and value 0, merged into one token with logit log((B - k) m).

    Args:
        retrieval: k entries and their weights.
        payload_tokens: m.
        num_entries: B.
        num_expired: of these, how many are left out as if they were not there; none is among the retrieved.
    """
    entries, alpha = retrieval.entries, retrieval.weights  # [k], [k]
    if weighting == "uniform":
        ones = np.ones(len(entries), dtype=np.float32)
        return EntryTerms(entries=entries, key_scale=ones, log_weight=np.zeros_like(ones), value_scale=ones)
    if weighting == "prior":
        used = alpha > 0
        ones = np.ones(int(used.sum()), dtype=np.float32)
        log_weight = np.log(alpha[used], dtype=np.float32)
        return EntryTerms(entries=entries[used], key_scale=ones, log_weight=log_weight, value_scale=ones)

    scale = np.sqrt(alpha, dtype=np.float32)
    left_out = (num_entries - num_expired - len(entries)) * payload_tokens
    return EntryTerms(
        entries=entries,
        key_scale=scale,
        log_weight=np.zeros_like(scale),
        value_scale=scale,
        log_remainder=math.log(left_out) if remainder and left_out else -math.inf,
    )
