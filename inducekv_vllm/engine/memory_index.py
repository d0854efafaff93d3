"""The API process's part of a bundle: retrieval keys, the gate's rule and metadata, without the payload.

Shapes: B entries, d hidden size, H evidence of the gate. Every worker holds the payload, and what the gate applies to
tokens; the digest identifies the bundle on both sides.
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
from ..retrieval.index import PrefixIndex
from ..retrieval.page_terms import FloatArray, IntArray, Retrieval, Weighting


@dataclass(frozen=True)
class QueryFeatures:
    """What a request's key pass has found. Each is None if the memory does not need it."""

    key: FloatArray | None = None  # [d] float32, unit norm: the mean of the final hidden states
    evidence: FloatArray | None = None  # [H] float32, for the gate


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
    token_digest: str = ""  # of what turns a prompt into the gate's evidence

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
            gate=gate.rule if gate is not None else None,
            token_digest=gate.token_digest if gate is not None else "",
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
    def asked_gate(self) -> str | None:
        """The digest under which the workers have the gate; None without one."""
        return self.digest if self.gate is not None else None

    @property
    def needs_retrieval_key(self) -> bool:
        """Whether weights depend on the request."""
        return self.weighting != "uniform"

    @property
    def needs_key_pass(self) -> bool:
        return self.gate is not None or self.needs_retrieval_key

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

    def lookup(self, query: QueryFeatures, top_k: int | None, now: datetime | None = None) -> MemoryLookup:
        """Find the entries and weights for a request; `top_k` None means all entries.

        They are those of the task that the gate chooses, or all B without a gate. Uniform weighting takes all of them
        with weight 1, whatever `top_k` says. Entries that have expired, and tasks that have no others, are left out:
        the answer is that of a memory without them.

        Args:
            now: the time of the request; None for the clock's.
        """
        alive = self.alive(now)
        num_expired = self.num_entries - len(alive)
        gate_decision = None
        if self.gate is not None:
            tasks = {self.entries[i].task for i in alive} | {record.task for record in self.metadata.task_adapters}
            assert query.evidence is not None
            gate_decision = self.gate.decide(query.evidence, tasks if num_expired else None)
            if gate_decision.task is None or self.metadata.adapter_of(gate_decision.task):
                return MemoryLookup(None, gate_decision, num_expired)
        elif not alive:
            return MemoryLookup(None, None, num_expired)
        chosen = [i for i in alive if gate_decision is None or self.entries[i].task == gate_decision.task]
        retrieval = self._retrieve(query.key, np.array(chosen, dtype=np.int64), top_k)
        return MemoryLookup(retrieval, gate_decision, num_expired)

    def _retrieve(self, key: FloatArray | None, entries: IntArray, top_k: int | None) -> Retrieval:
        """Weights for entries [n], or for the `top_k` of them that are closest to the key."""
        if not self.needs_retrieval_key:
            return Retrieval(entries, np.ones(len(entries), dtype=np.float32))
        assert self.index is not None
        assert key is not None
        return self.index.search(key, self.temperature, top_k, None if len(entries) == self.num_entries else entries)
