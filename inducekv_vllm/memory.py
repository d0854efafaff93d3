"""A bundle as the API process holds it: keys and what a request must know of it, no payload.

Letters: B entries, d hidden size. The payload lives once on every worker; the two halves meet by the bundle's digest.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from .bundle import Bundle, EntryRecord
from .retrieval import FloatArray, PrefixIndex, Retrieval, Weighting


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
    adapter: str | None  # the LoRA adapter both passes run with

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
        )

    @property
    def num_entries(self) -> int:
        return len(self.entries)

    def retrieve(self, key: FloatArray, top_k: int | None) -> Retrieval:
        """Entries and weights for a query key [d] float32, unit norm; `top_k` None means all B."""
        return self.index.search(key, self.temperature, top_k)
