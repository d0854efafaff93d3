"""What a bundle's gate and index say about a request: entries and weights, or nothing.

Shapes: B entries, d hidden size, H evidence of the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property

import numpy as np

from ..gate import GateDecision, RelevanceGate
from ..retrieval.entry_terms import FloatArray, IntArray, Retrieval
from ..retrieval.index import KeyIndex
from .metadata import BundleMetadata
from .tensors import Bundle


@dataclass(frozen=True)
class QueryFeatures:
    """What a prompt tells. Each is None if the memory does not need it."""

    key: FloatArray | None = None  # [d] float32, unit norm: the mean of the final hidden states
    evidence: FloatArray | None = None  # [H] float32, for the gate


@dataclass(frozen=True)
class LookupResult:
    """The result of a lookup for one request."""

    retrieval: Retrieval | None  # None if the gate is closed, or sends the request to a task that has an adapter
    gate_decision: GateDecision | None  # None for a memory without a gate
    num_expired: int = 0  # entries of the memory that took no part


@dataclass(frozen=True)
class DatedEntries:
    """A bundle's entries, some of which may expire."""

    metadata: BundleMetadata

    @cached_property
    def _first_expiry(self) -> datetime | None:
        return min((each.expires_at for each in self.metadata.entries if each.expires_at is not None), default=None)

    def alive(self, now: datetime | None = None) -> Sequence[int]:
        """The entries that have not expired; `now` None for the clock's."""
        entries = self.metadata.entries
        if self._first_expiry is None or (moment := now or datetime.now(UTC)) < self._first_expiry:
            return range(len(entries))
        return [i for i, entry in enumerate(entries) if not entry.has_expired(moment)]


@dataclass(frozen=True)
class BundleIndex(DatedEntries):
    """The index and gate of one bundle."""

    keys: KeyIndex | None  # over the retrieval keys [B, d]; None without entries
    temperature: float
    gate: RelevanceGate | None = None

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> BundleIndex:
        gate = bundle.gate
        return cls(
            metadata=bundle.metadata,
            keys=KeyIndex(bundle.retrieval_keys.numpy()) if bundle.num_entries else None,
            temperature=float(bundle.temperature),
            gate=gate.rule if gate is not None else None,
        )

    def lookup(self, query: QueryFeatures, top_k: int | None, now: datetime | None = None) -> LookupResult:
        """Find the entries and weights for a request; `top_k` None means all entries.

        They are those of the task that the gate chooses, or all B without a gate. Uniform weighting takes all of them
        with weight 1, whatever `top_k` says. Entries that have expired, and tasks that have no others, are left out:
        the answer is that of a memory without them.

        Args:
            now: the time of the request; None for the clock's.
        """
        entries = self.metadata.entries
        alive = self.alive(now)
        num_expired = len(entries) - len(alive)
        gate_decision = None
        if self.gate is not None:
            adapters = {record.task for record in self.metadata.task_adapters}
            tasks = {entries[i].task for i in alive} | adapters | set(self.metadata.fact_tasks)
            assert query.evidence is not None
            gate_decision = self.gate.decide(query.evidence, tasks if num_expired else None)
            if gate_decision.task is None or self.metadata.adapter_of(gate_decision.task):
                return LookupResult(None, gate_decision, num_expired)
        elif not alive:
            return LookupResult(None, None, num_expired)
        chosen = [i for i in alive if gate_decision is None or entries[i].task == gate_decision.task]
        if not chosen:  # the task has facts alone
            return LookupResult(None, gate_decision, num_expired)
        retrieval = self._retrieve(query.key, np.array(chosen, dtype=np.int64), top_k)
        return LookupResult(retrieval, gate_decision, num_expired)

    def _retrieve(self, key: FloatArray | None, entries: IntArray, top_k: int | None) -> Retrieval:
        """Weights for entries [n], or for the `top_k` of them that are closest to the key."""
        if self.metadata.weighting == "uniform":
            return Retrieval(entries, np.ones(len(entries), dtype=np.float32))
        assert self.keys is not None
        assert key is not None
        among = None if len(entries) == len(self.metadata.entries) else entries
        return self.keys.search(key, self.temperature, top_k, among)
