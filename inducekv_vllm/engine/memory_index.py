"""A bundle as the API process holds it: keys and what a request must know of it, no payload.

Letters: B entries, d hidden size. The payload lives once on every worker; the two halves meet by the bundle's digest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from ..bundle import Bundle, EntryRecord, Gate
from ..gate import Relevance, RelevanceGate
from ..retrieval import FloatArray, PrefixIndex, Retrieval, Weighting


@dataclass(frozen=True)
class Recall:
    """What a memory has for one request."""

    retrieval: Retrieval | None  # None: the gate is closed, and the request runs on the untouched model
    relevance: Relevance | None  # the gate's verdict; None for a memory without a gate


@dataclass(frozen=True)
class Memory:
    """One version of a memory; a changed file is another one, with another digest."""

    digest: str
    path: str  # where the workers read the same file
    file_bytes: int
    index: PrefixIndex  # over the retrieval keys [B, d]
    temperature: float
    weighting: Weighting
    entries: tuple[EntryRecord, ...]  # [B], in the order of the index
    budget: int
    payload_tokens: int
    adapter: str | None  # the LoRA adapter both passes run with, whether the gate is open or closed
    gate: RelevanceGate | None = None

    @classmethod
    def from_bundle(cls, bundle: Bundle, path: str) -> Memory:
        """Raises OSError when the file the bundle was read from is gone."""
        return cls(
            digest=bundle.digest,
            path=path,
            file_bytes=os.path.getsize(path),
            index=PrefixIndex(bundle.retrieval_keys.numpy()),
            temperature=float(bundle.temperature),
            weighting=bundle.metadata.weighting,
            entries=bundle.metadata.entries,
            budget=bundle.metadata.budget,
            payload_tokens=bundle.payload_tokens,
            adapter=bundle.metadata.adapter,
            gate=_relevance_gate(bundle.gate) if bundle.gate is not None else None,
        )

    @property
    def num_entries(self) -> int:
        return len(self.entries)

    def recall(self, key: FloatArray, top_k: int | None) -> Recall:
        """Entries and weights for a query key [2, d]; `top_k` None means all there are.

        Without a gate the full-prefix part searches all B entries. A gate names the task whose entries are searched.
        """
        relevance = self.gate.judge(key) if self.gate is not None else None
        if relevance is not None and relevance.task is None:
            return Recall(None, relevance)
        among = None
        if relevance is not None:
            among = np.array([i for i, entry in enumerate(self.entries) if entry.task == relevance.task])
        return Recall(self.index.search(key[0], self.temperature, top_k, among), relevance)


def _relevance_gate(gate: Gate) -> RelevanceGate:
    return RelevanceGate(gate.keys.numpy(), gate.thresholds.numpy(), gate.tasks)
