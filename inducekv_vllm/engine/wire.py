"""What the API process asks of the worker for one request, as it travels in `SamplingParams.extra_args`.

No vLLM import: both processes and the tests use it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EXTRA_ARGS_KEY = "inducekv"


@dataclass(frozen=True)
class KeyOrder:
    """First pass: keep the query key under this id."""

    key_id: str

    def to_extra_args(self) -> dict[str, Any]:
        return {"key_id": self.key_id}


@dataclass(frozen=True)
class MemoryOrder:
    """Second pass: inject these entries of this bundle with these weights."""

    bundle: str  # digest
    entries: tuple[int, ...]  # [k]
    weights: tuple[float, ...]  # [k], alpha
    remainder: bool

    @property
    def content(self) -> str:
        """Digest of everything that changes a KV cache: names a memory slot, and salts the prefix cache."""
        parts = [self.bundle, list(self.entries), [w.hex() for w in self.weights], self.remainder]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def to_extra_args(self) -> dict[str, Any]:
        return {
            "bundle": self.bundle,
            "entries": list(self.entries),
            "weights": list(self.weights),
            "remainder": self.remainder,
        }


def parse_order(extra_args: Mapping[str, Any] | None) -> KeyOrder | MemoryOrder | None:
    """Read back what `to_extra_args` wrote under `EXTRA_ARGS_KEY`; None for a request without memory.

    Raises:
        ValueError: something under the key that neither order wrote.
    """
    raw = (extra_args or {}).get(EXTRA_ARGS_KEY)
    if raw is None:
        return None
    if isinstance(raw, Mapping) and raw.keys() == {"key_id"}:
        return KeyOrder(str(raw["key_id"]))
    if isinstance(raw, Mapping) and raw.keys() == {"bundle", "entries", "weights", "remainder"}:
        entries, weights = tuple(map(int, raw["entries"])), tuple(map(float, raw["weights"]))
        return MemoryOrder(str(raw["bundle"]), entries, weights, bool(raw["remainder"]))
    raise ValueError(f"extra_args[{EXTRA_ARGS_KEY!r}] is neither a key order nor a memory order: {raw!r}")
