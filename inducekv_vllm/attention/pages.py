"""A bundle in the resident pool, once for all requests, and one slot's view of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import UnsupportedModel
from ..retrieval.page_terms import Form, IntArray, Weighting
from .page_allocator import Region
from .resident_gate import ResidentGate


@dataclass(frozen=True, eq=False)
class LayerPages:
    """One layer of the pool on this rank, and a bundle's numbers for it."""

    keys: Tensor  # [J, P, D], before RoPE, as at position 0
    values: Tensor  # [J, P, D], before the value gate
    gate: float
    bias: float
    # The same memory as rows of maps of the attention output, for a bundle that has any.
    map_in: Tensor | None = None  # [J, P / G, G D]
    map_out: Tensor | None = None  # [J, P / G, G D], transposed, before the gate


@dataclass(frozen=True, eq=False)
class ResidentBundle:
    """The part of a bundle that a worker needs, and where it lies in the pool."""

    digest: str
    num_entries: int  # B
    payload_tokens: int  # m
    weighting: Weighting
    form: Form
    layers: tuple[LayerPages, ...]  # [L]
    map_rank: int  # r; 0: no maps
    pages: IntArray  # [n] of G tokens that it lies in; others may lie in them too
    page_bytes: int
    num_shared: int  # entries that were in the pool when it was loaded, and were not copied
    region: Region
    tokens: IntArray  # [B, m] places in the pool
    null_tokens: IntArray  # [B] place of a token with key and value 0; decoupled memory alone
    map_rows: IntArray  # [B, r] places among the rows of maps
    gate: ResidentGate | None = None  # beside the pool

    @property
    def nbytes(self) -> int:
        """Of its pages."""
        return len(self.pages) * self.page_bytes


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
    """What one slot reads of a resident bundle: its `PageTerms`, repeated for each memory token and row of a map.

    The last of the S tokens of decoupled memory has key and value 0 and log weight 0.

    `TermTables.write` makes it. None stands for the neutral value (ones, zeros); the kernels then skip that term.
    """

    bundle: ResidentBundle
    num_tokens: int  # S
    tokens: slice | Tensor  # [S] places in the pool, int64 if they are not adjacent
    key_scale: Tensor | None  # [S] float32
    log_weight: Tensor | None  # [S] float32
    value_scale: Tensor | None  # [S] float32
    log_remainder: float  # -inf: none
    map_rows: slice | Tensor  # [k r] places among the rows of maps
    map_weight: Tensor | None  # [k r] float32
    slot: int
    entries: bytes  # of the bundle, in the order of the tokens
    first_entry: int | None  # if they are adjacent in the bundle; in the pool they need not be

    @property
    def has_remainder(self) -> bool:
        return self.log_remainder != -math.inf

    @property
    def table_length(self) -> int:
        """The tokens of the slot's table, which leaves out the null token of decoupled memory."""
        return self.num_tokens - (self.bundle.form == "decoupled")

    @property
    def page_set(self) -> tuple[int, bytes]:
        """Equal for memories that read the same tokens and rows of maps in the same order."""
        return id(self.bundle), self.entries

    @cached_property
    def biased_log_weight(self) -> Tensor | None:
        """The log weights of a decoupled memory with each layer's bias, [L, S] float32; None if they are all 0."""
        if self.log_weight is None and not any(pages.bias for pages in self.bundle.layers):
            return None
        bias = torch.tensor([pages.bias for pages in self.bundle.layers])  # [L]
        log_weight = torch.zeros(self.num_tokens) if self.log_weight is None else self.log_weight
        return pad(bias[:, None] + log_weight[:-1], (0, 1))

    @cached_property
    def views(self) -> list[tuple[Tensor, Tensor]] | None:
        """Each layer's keys and values [J, S, D], if they are adjacent."""
        if not isinstance(self.tokens, slice):
            return None
        return [(pages.keys[:, self.tokens], pages.values[:, self.tokens]) for pages in self.bundle.layers]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys and values: [J, S, D]."""
        if self.views is not None:
            return self.views[layer]
        pages = self.bundle.layers[layer]
        return pages.keys[:, self.tokens], pages.values[:, self.tokens]


def span_of(places: IntArray) -> slice | Tensor:
    """Places as an index: a slice if they are adjacent and ascending, which reads them without a copy."""
    if len(places) == 0:
        return slice(0, 0)
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 == len(places) and bool((np.diff(places) == 1).all()):
        return slice(first, last + 1)
    return torch.from_numpy(places)
