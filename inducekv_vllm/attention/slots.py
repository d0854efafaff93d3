"""Memory slots: what one memory with one set of weights is read from, by all requests that have both.

Slots are keyed by content, so the samples of one request (`n > 1`), all requests of a task whose memory is trained, and
requests that repeat a prompt share a slot. A slot that nobody holds keeps what it has until another memory needs it:
the next request of its task writes nothing.

Shapes: see the package; k entries of m tokens and r rows of a map in a slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from ..errors import CapacityError
from ..retrieval.entry_terms import EntryTerms, FloatArray, IntArray
from .resident_bundle import ResidentBundle

NO_MEMORY = 0  # a slot that reads nothing


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
    def acts(self) -> list[bool]:
        """In which layers [L] anything is added."""
        return list(map(bool, np.any(self.bundle.acts[self.entries], axis=0)))

    @cached_property
    def layers(self) -> frozenset[int]:
        """Those in which anything is added."""
        return frozenset(layer for layer, acts in enumerate(self.acts) if acts)

    @cached_property
    def first_layer(self) -> int:
        """In those before, nothing is added."""
        return self.acts.index(True) if True in self.acts else len(self.acts)

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
        """Each layer's keys [J, S, D] and values [J, S, V], if they are adjacent."""
        if not isinstance(self.tokens, slice):
            return None
        return [(layer.keys[:, self.tokens], layer.values[:, self.tokens]) for layer in self.bundle.layers]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's keys [J, S, D] and values [J, S, V]."""
        if self.views is not None:
            return self.views[layer]
        stored = self.bundle.layers[layer]
        return stored.keys[:, self.tokens], stored.values[:, self.tokens]


@dataclass(frozen=True, eq=False)
class ActingRows:
    """The rows of one request that its memory acts on: `first` to `end` of the step's query tensor, at least one."""

    memory: RequestMemory
    request: int  # its number in the step
    first: int
    end: int
    round: int = 0  # 1 for the second of two memories, which acts on what the first one has made of the output


@dataclass
class _Held:
    memory: RequestMemory
    references: int = 0


@dataclass(frozen=True)
class _Idle:
    """A slot that nobody holds, and whose memory it still has."""

    slot: int
    bundle: ref[ResidentBundle]  # it does not keep an unloaded bundle


class Slots:
    """Slots 1..capacity, with reference counts by content."""

    def __init__(self, capacity: int, fill: Callable[[RequestMemory], object]) -> None:
        """
        Args:
            fill: is called with what a slot reads, once its requests are about to run and the slot has something else.
        """
        self.capacity = capacity
        self._fill = fill
        self._empty = list(range(capacity, NO_MEMORY, -1))
        self._held: dict[str, _Held] = {}  # by content
        self._idle: dict[str, _Idle] = {}  # by content, the longest idle first

    @property
    def used(self) -> int:
        return len(self._held)

    def acquire(self, content: str, bundle: ResidentBundle, terms: EntryTerms) -> RequestMemory:
        """Hold a slot for one more request; `content` identifies the memory and its weights.

        Raises:
            CapacityError: no slot is free. Nothing changes.
        """
        if (held := self._held.get(content)) is None:
            held = self._held[content] = _Held(self._take(content, bundle, terms))
        held.references += 1
        return held.memory

    def release(self, content: str) -> None:
        """Let go of a slot that `acquire` has given; after the last request it is free."""
        held = self._held[content]
        held.references -= 1
        if not held.references:
            del self._held[content]
            self._idle[content] = _Idle(held.memory.slot, ref(held.memory.bundle))

    def _take(self, content: str, bundle: ResidentBundle, terms: EntryTerms) -> RequestMemory:
        """A free slot that has this memory: as it is, empty, or the longest idle one."""
        idle = self._idle.pop(content, None)
        if idle is not None and idle.bundle() is bundle:
            return RequestMemory.of(bundle, terms, idle.slot)
        if idle is not None:
            self._empty.append(idle.slot)
        if not self._empty:
            if not self._idle:
                raise CapacityError(f"all {self.capacity} memory slots are in use")
            self._empty.append(self._idle.pop(next(iter(self._idle))).slot)
        memory = RequestMemory.of(bundle, terms, self._empty[-1])
        self._fill(memory)
        self._empty.pop()
        return memory


def _spread(terms: FloatArray, per_entry: int, neutral: float) -> Tensor | None:
    """The terms [k] of entries, for each of their tokens or rows; None if all are neutral."""
    return None if bool((terms == neutral).all()) else torch.from_numpy(np.repeat(terms, per_entry))
