"""Key passes that ask a relevance gate: once the whole prompt is in the KV cache, its values there are the evidence.

So a pass computes only what the prefix cache does not have. Finished evidence is on its way to the host; nobody but its
reader waits for it.

Shapes: T prompt tokens of a request, t of them deciding, H evidence of a gate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cachetools import FIFOCache
from torch import Tensor

from ..attention.resident_gate import ResidentGate
from ..gate import Deciding, deciding_tokens, last_averaged
from ..host.device import Device
from ..host.runner import StepRows
from .cached_values import CachedValues
from .query_keys import MAX_PENDING, KeyPassResult

Blocks = Sequence[Sequence[int]]  # of each group of the KV cache, a request's blocks in order


@dataclass
class _Running:
    key_id: str
    gate: ResidentGate
    num_tokens: int  # T
    deciding: Deciding
    blocks: list[list[int]]


class GatePasses:
    """The running passes, and what finished ones have found."""

    def __init__(
        self,
        values: CachedValues,
        placeholders: Collection[int],
        add_up: Callable[[Tensor], Tensor],
        device: Device,
        max_pending: int = MAX_PENDING,
    ) -> None:
        """
        Args:
            placeholders: the ids of tokens that stand for media.
            add_up: the sum of a tensor over the ranks.
        """
        self._values, self._placeholders, self._add_up, self._device = values, placeholders, add_up, device
        self._running: dict[str, _Running] = {}
        self._finished: FIFOCache[str, KeyPassResult] = FIFOCache(max_pending)

    @property
    def pending(self) -> int:
        return len(self._finished)

    def is_running(self, request_id: str) -> bool:
        return request_id in self._running

    def start(self, request_id: str, key_id: str, gate: ResidentGate, token_ids: Sequence[int], blocks: Blocks) -> None:
        """Begin a pass over a prompt [T]."""
        deciding = deciding_tokens(token_ids, gate.marks, self._placeholders)
        self._running[request_id] = _Running(key_id, gate, len(token_ids), deciding, [list(each) for each in blocks])

    def extend(self, request_id: str, blocks: Blocks) -> None:
        """A request, perhaps one of these, has got more blocks."""
        if (run := self._running.get(request_id)) is not None:
            for own, new in zip(run.blocks, blocks, strict=True):
                own.extend(new)

    def move(self, request_id: str, blocks: Blocks) -> None:
        """A request, perhaps one of these, was preempted and goes on with these blocks alone."""
        if (run := self._running.get(request_id)) is not None:
            run.blocks = [list(each) for each in blocks]

    def complete(self, rows: StepRows) -> None:
        """Find the evidence of the passes whose last prompt token is in this step; its forward pass is queued."""
        for request_id, computed, scheduled in zip(
            rows.request_ids, rows.num_computed, rows.num_scheduled, strict=True
        ):
            run = self._running.get(request_id)
            if run is not None and computed + scheduled >= run.num_tokens:
                del self._running[request_id]
                text, media = run.deciding
                values = self._values.read(run.gate.layers, run.blocks, text + media)  # [t, S, F of this rank]
                evidence = run.gate.scores.evidence(last_averaged(values, len(text)), self._add_up)  # [H]
                self._finished[run.key_id] = KeyPassResult(self._device.to_host(evidence), run.num_tokens)

    def finish(self, request_ids: set[str]) -> None:
        """Drop these requests, which have ended."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def pop(self, key_id: str) -> KeyPassResult | None:
        """Return a finished pass's evidence and drop it."""
        return self._finished.pop(key_id, None)
