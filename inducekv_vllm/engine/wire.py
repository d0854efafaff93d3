"""What the API process tells the scheduler and the worker about one request, in `SamplingParams.extra_args`."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

EXTRA_ARGS_KEY = "inducekv"
LEAST_DELAY_S, LONGEST_DELAY_S = 0.002, 0.02


def poll_delays() -> Iterator[float]:
    """Seconds to wait between questions whether the workers have done what they do in the background.

    A tenth of the time since this call, so that the answer comes little later than the end of the work.
    """
    began = time.monotonic()
    return (min(max(LEAST_DELAY_S, (time.monotonic() - began) / 10), LONGEST_DELAY_S) for _ in itertools.count())


@dataclass(frozen=True)
class KeyPassSpec:
    """First pass: the worker keeps what it finds under this id."""

    key_id: str
    gate: str | None  # digest of the bundle whose gate is asked for its evidence
    retrieval: bool  # whether the query key for the retrieval is needed; the pass then computes the whole prompt

    def to_extra_args(self) -> dict[str, Any]:
        return {"key_id": self.key_id, "gate": self.gate, "retrieval": self.retrieval}


@dataclass(frozen=True)
class InjectionSpec:
    """Second pass: the worker injects k entries of a bundle."""

    bundle: str  # its digest
    entries: tuple[int, ...]  # [k]
    weights: tuple[float, ...]  # [k], alpha
    remainder: bool
    start: int = 0  # the first position that memory acts on; above 0 for decoupled memory only
    expired: int = 0  # entries of the bundle that the request is answered without, as if they were not there

    @property
    def content(self) -> str:
        """Digest of everything that decides what memory adds at a position it acts on; it identifies a memory slot."""
        parts = [self.bundle, list(self.entries), [w.hex() for w in self.weights], self.remainder, self.expired]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def to_extra_args(self) -> dict[str, Any]:
        return {
            "bundle": self.bundle,
            "entries": list(self.entries),
            "weights": list(self.weights),
            "remainder": self.remainder,
            "start": self.start,
            "expired": self.expired,
        }


def parse_spec(extra_args: Mapping[str, Any] | None) -> KeyPassSpec | InjectionSpec | None:
    """Parse the output of `to_extra_args` under `EXTRA_ARGS_KEY`; None for a request without memory.

    Raises:
        ValueError: the value is neither of the two specs.
    """
    raw = (extra_args or {}).get(EXTRA_ARGS_KEY)
    if raw is None:
        return None
    if isinstance(raw, Mapping) and raw.keys() == {"key_id", "gate", "retrieval"}:
        gate = raw["gate"]
        return KeyPassSpec(str(raw["key_id"]), None if gate is None else str(gate), bool(raw["retrieval"]))
    if isinstance(raw, Mapping) and raw.keys() == {"bundle", "entries", "weights", "remainder", "start", "expired"}:
        entries, weights = tuple(map(int, raw["entries"])), tuple(map(float, raw["weights"]))
        return InjectionSpec(
            str(raw["bundle"]), entries, weights, bool(raw["remainder"]), int(raw["start"]), int(raw["expired"])
        )
    raise ValueError(f"extra_args[{EXTRA_ARGS_KEY!r}] is neither a key-pass spec nor an injection spec: {raw!r}")
