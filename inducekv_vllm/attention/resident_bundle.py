"""A bundle in the resident pool, once for all requests, and what one slot reads of it.

Shapes: see the package; B entries of m tokens and r rows of a map, k of them in a slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ..backbone.stored_facts import StoredFacts
from ..bundle.lookup import MemoryIndex
from ..errors import UnsupportedModel
from ..gate import TurnMarks
from ..retrieval.entry_terms import EntryTerms, FloatArray, Form, IntArray, Weighting
from .ranges import Region
from .resident_gate import ResidentGate


@dataclass(frozen=True, eq=False)
class LayerMemory:
    """What lies in one layer of the pool on this rank, and a bundle's numbers for it. The entries are in order."""

    keys: Tensor  # [J, B m, D], before RoPE, as at position 0
    values: Tensor  # [J, B m, D], before the value gate
    gate: float
    bias: float
    # The same memory as rows of maps of the attention output, for a bundle that has any.
    map_in: Tensor | None = None  # [J, B r, G D]
    map_out: Tensor | None = None  # [J, B r, G D], transposed, before the gate


@dataclass(frozen=True, eq=False)
class ResidentBundle:
    """The part of a bundle that a worker needs, and where it lies in the pool."""

    digest: str
    num_entries: int  # B
    payload_tokens: int  # m
    weighting: Weighting
    form: Form
    layers: tuple[LayerMemory, ...]  # [L]
    map_rank: int  # r; 0: no maps
    region: Region
    nbytes: int  # of the region
    first_token: int  # place in the pool
    first_map_row: int  # place among the rows of maps
    index: MemoryIndex  # on the host
    first_layers: IntArray  # [B], the first layer in which an entry does anything
    gate: ResidentGate | None = None  # beside the pool
    facts: StoredFacts | None = None  # on the first rank's host
    picture_marks: TurnMarks | None = None  # for a bundle whose facts are told apart by pictures, too


def kv_heads_of_rank(num_kv_heads: int, tp_rank: int, tp_size: int) -> slice:
    """Return the KV heads of a tensor-parallel rank as in vLLM: an equal share, or one replicated head.

    Raises:
        UnsupportedModel: the heads cannot be split evenly.
    """
    if num_kv_heads >= tp_size:
        if num_kv_heads % tp_size:
            raise UnsupportedModel(f"{num_kv_heads} KV heads cannot be shared out over {tp_size} ranks")
        share = num_kv_heads // tp_size
        return slice(tp_rank * share, (tp_rank + 1) * share)
    if tp_size % num_kv_heads:
        raise UnsupportedModel(f"{num_kv_heads} KV heads cannot be replicated over {tp_size} ranks")
    head = tp_rank // (tp_size // num_kv_heads)
    return slice(head, head + 1)


@dataclass(frozen=True, eq=False)
class RequestMemory:
    """What one slot reads of a resident bundle, with the terms of each memory token and row of a map.

    None stands for terms that are all neutral (ones, zeros).
    """

    bundle: ResidentBundle
    terms: EntryTerms  # of k entries, in the order of the bundle
    slot: int

    @classmethod
    def of(cls, bundle: ResidentBundle, terms: EntryTerms, slot: int) -> RequestMemory:
        """Put the terms in the order of the bundle: adjacent entries are then read without a copy."""
        order = np.argsort(terms.entries)
        ordered = EntryTerms(
            entries=terms.entries[order],
            key_scale=terms.key_scale[order],
            log_weight=terms.log_weight[order],
            value_scale=terms.value_scale[order],
            log_remainder=terms.log_remainder,
        )
        return cls(bundle, ordered, slot)

    @property
    def entries(self) -> IntArray:
        """[k], ascending."""
        return self.terms.entries

    @property
    def num_tokens(self) -> int:
        """S = k m"""
        return len(self.entries) * self.bundle.payload_tokens

    @property
    def log_remainder(self) -> float:
        """-inf: none."""
        return self.terms.log_remainder

    @property
    def has_remainder(self) -> bool:
        return self.log_remainder != -math.inf

    @cached_property
    def first_layer(self) -> int:
        """In those before, nothing is added."""
        return int(self.bundle.first_layers[self.entries].min())

    @cached_property
    def first_entry(self) -> int | None:
        """If the entries are adjacent."""
        first, last = int(self.entries[0]), int(self.entries[-1])
        return first if last - first + 1 == len(self.entries) else None

    @cached_property
    def tokens(self) -> slice | Tensor:
        """[S] places in the bundle, int64 if they are not adjacent."""
        return self._places(self.bundle.payload_tokens)

    @cached_property
    def map_rows(self) -> slice | Tensor:
        """[k r] places among the bundle's rows of maps."""
        return self._places(self.bundle.map_rank)

    def _places(self, per_entry: int) -> slice | Tensor:
        if self.first_entry is not None:
            return slice(self.first_entry * per_entry, (self.first_entry + len(self.entries)) * per_entry)
        return torch.from_numpy((self.entries[:, None] * per_entry + np.arange(per_entry)).reshape(-1))

    @cached_property
    def key_scale(self) -> Tensor | None:
        """[S] float32"""
        return _spread(self.terms.key_scale, self.bundle.payload_tokens, neutral=1.0)

    @cached_property
    def log_weight(self) -> Tensor | None:
        """[S] float32"""
        return _spread(self.terms.log_weight, self.bundle.payload_tokens, neutral=0.0)

    @cached_property
    def value_scale(self) -> Tensor | None:
        """[S] float32"""
        return _spread(self.terms.value_scale, self.bundle.payload_tokens, neutral=1.0)

    @cached_property
    def map_weights(self) -> FloatArray:
        """[k], of each entry's map."""
        return np.exp(self.terms.log_weight) * self.terms.value_scale

    @cached_property
    def map_weight(self) -> Tensor | None:
        """[k r] float32"""
        return _spread(self.map_weights, self.bundle.map_rank, neutral=1.0)

    @cached_property
    def biased_log_weight(self) -> Tensor | None:
        """The log weights with each layer's bias, [L, S] float32; None if they are all 0."""
        bias = torch.tensor([layer.bias for layer in self.bundle.layers])  # [L]
        if self.log_weight is None and not bias.any():
            return None
        log_weight = torch.zeros(self.num_tokens) if self.log_weight is None else self.log_weight
        return bias[:, None] + log_weight

    @cached_property
    def views(self) -> list[tuple[Tensor, Tensor]] | None:
        """Each layer's keys and values [J, S, D], if they are adjacent."""
        if not isinstance(self.tokens, slice):
            return None
        return [(layer.keys[:, self.tokens], layer.values[:, self.tokens]) for layer in self.bundle.layers]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values: [J, S, D]."""
        if self.views is not None:
            return self.views[layer]
        stored = self.bundle.layers[layer]
        return stored.keys[:, self.tokens], stored.values[:, self.tokens]


def _spread(terms: FloatArray, per_entry: int, neutral: float) -> Tensor | None:
    """The terms [k] of entries, for each of their tokens or rows; None if all are neutral."""
    return None if bool((terms == neutral).all()) else torch.from_numpy(np.repeat(terms, per_entry))
