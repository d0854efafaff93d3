"""The API process's part of a bundle: retrieval keys, gate and metadata, without the payload.

Shapes: B entries, d hidden size. Every worker holds the payload; the digest identifies the bundle on both sides.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property

import numpy as np

from ..bundle import Bundle, BundleMetadata, EntryRecord
from ..gate import GateDecision, RelevanceGate
from ..page_terms import FloatArray, IntArray, Retrieval, Weighting
from ..retrieval import PrefixIndex


@dataclass(frozen=True)
class MemoryLookup:
    """The result of a lookup for one request."""

    retrieval: Retrieval | None  # None if the gate is closed, or sends the request to a task that has an adapter
    gate_decision: GateDecision | None  # None for a memory without a gate
    num_expired: int = 0  # entries of the memory that took no part


@dataclass(frozen=True)
class MemoryIndex:
    """One version of a memory. A changed file is another version with another digest."""

    metadata: BundleMetadata
    path: str  # the workers read the same file
    file_bytes: int
    index: PrefixIndex | None  # over the retrieval keys [B, d]; None without entries
    temperature: float
    gate: RelevanceGate | None = None

    @classmethod
    def from_bundle(cls, bundle: Bundle, path: str) -> MemoryIndex:
        """Raises OSError if the file at `path` has been removed."""
        gate = bundle.gate
        return cls(
            metadata=bundle.metadata,
            path=path,
            file_bytes=os.path.getsize(path),
            index=PrefixIndex(bundle.retrieval_keys.numpy()) if bundle.num_entries else None,
            temperature=float(bundle.temperature),
            gate=RelevanceGate(gate.keys.numpy(), gate.thresholds.numpy(), gate.tasks) if gate is not None else None,
        )

    @property
    def digest(self) -> str:
        return self.metadata.digest

    @property
    def weighting(self) -> Weighting:
        return self.metadata.weighting

    @property
    def entries(self) -> tuple[EntryRecord, ...]:
        """[B], in the order of the index."""
        return self.metadata.entries

    @property
    def payload_tokens(self) -> int:
        return self.metadata.payload_tokens

    @property
    def key_pass_reads_cache(self) -> bool:
        """Whether the last bits of a query key decide nothing but a tie of the gate; weights would differ in theirs."""
        return self.weighting == "uniform"

    @property
    def num_entries(self) -> int:
        return len(self.entries)

    @property
    def adapter(self) -> str | None:
        """The LoRA adapter for both passes, whether the gate is open or closed."""
        return self.metadata.adapter

    @cached_property
    def first_expiry(self) -> datetime | None:
        return min((entry.expires_at for entry in self.entries if entry.expires_at is not None), default=None)

    def alive(self, now: datetime | None = None) -> Sequence[int]:
        """The entries that have not expired; `now` None for the clock's."""
        if self.first_expiry is None or (moment := now or datetime.now(UTC)) < self.first_expiry:
            return range(self.num_entries)
        return [i for i, entry in enumerate(self.entries) if not entry.has_expired(moment)]

    def lookup(self, key: FloatArray, top_k: int | None, now: datetime | None = None) -> MemoryLookup:
        """Find the entries and weights for a query key [2, d]; `top_k` None means all entries.

        The prefix part of the key searches the entries of the task that the gate chooses, or all B without a gate.
        Entries that have expired, and tasks that have no others, are left out: the answer is that of a memory without
        them.

        Args:
            now: the time of the request; None for the clock's.
        """
        alive = self.alive(now)
        num_expired = self.num_entries - len(alive)
        gate_decision = None
        if self.gate is not None:
            tasks = {self.entries[i].task for i in alive} | {record.task for record in self.metadata.task_adapters}
            gate_decision = self.gate.decide(key, tasks if num_expired else None)
            if gate_decision.task is None or self.metadata.adapter_of(gate_decision.task):
                return MemoryLookup(None, gate_decision, num_expired)
        elif not alive:
            return MemoryLookup(None, None, num_expired)
        assert self.index is not None
        among: IntArray | None = None
        if gate_decision is not None:
            among = np.array([i for i in alive if self.entries[i].task == gate_decision.task])
        elif num_expired:
            among = np.array(alive)
        return MemoryLookup(self.index.search(key[0], self.temperature, top_k, among), gate_decision, num_expired)

    def erase(self) -> None:
        """Overwrite the keys with zeros: freed memory keeps its content. The index cannot be used afterwards."""
        if self.index is not None:
            self.index.erase()
        if self.gate is not None:
            self.gate.keys.fill(0)
