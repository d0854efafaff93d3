"""Query keys of running key passes: sums over prompt chunks, kept until the API process fetches the key.

A step only adds on the device. A finished key is on its way to the host; nobody but its reader waits for it.

Shapes: T prompt tokens of a request, d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

from cachetools import FIFOCache
from torch import Tensor
from torch.nn.functional import normalize

from ..host.device import Device, HostCopy

MAX_PENDING = 4096  # a request aborted after its key pass never fetches what that has left; the oldest are dropped


@dataclass
class _Running:
    key_id: str
    num_tokens: int  # T
    seen: int = 0  # tokens so far
    total: Tensor | float = 0.0  # [d] float32, once a row has been seen


@dataclass(frozen=True)
class KeyPassResult:
    """What a finished key pass has left: a query key [d], or evidence [H]."""

    copy: HostCopy  # float32
    num_tokens: int  # T

    @property
    def values(self) -> Tensor:
        return self.copy.wait()

    def to_bytes(self) -> bytes:
        """In native byte order; both processes run on one machine."""
        return self.values.contiguous().numpy().tobytes()


class QueryKeyAccumulator:
    """Accumulates the means over the final hidden states (paper, Eq. key_rewrite) of prompts in any chunks."""

    def __init__(self, device: Device, max_pending: int = MAX_PENDING) -> None:
        self._device = device
        self._running: dict[str, _Running] = {}
        self._finished: FIFOCache[str, KeyPassResult] = FIFOCache(max_pending)

    @property
    def any_running(self) -> bool:
        return bool(self._running)

    @property
    def pending(self) -> int:
        return len(self._finished)

    def is_running(self, request_id: str) -> bool:
        return request_id in self._running

    def start(self, request_id: str, key_id: str, num_tokens: int) -> None:
        """Begin a key pass over T = `num_tokens`, all of which it computes."""
        self._running[request_id] = _Running(key_id, num_tokens)

    def restart(self, request_id: str) -> None:
        """Begin a running key pass again, if it is one: the request was preempted and computes its prompt anew."""
        if (run := self._running.get(request_id)) is not None:
            self.start(request_id, run.key_id, run.num_tokens)

    def add(self, request_id: str, hidden: Tensor) -> None:
        """Add the final hidden states [rows, d] of the request's next rows, in order."""
        run = self._running[request_id]
        count = min(len(hidden), run.num_tokens - run.seen)  # without generated tokens
        run.total = run.total + hidden[:count].float().sum(0)
        run.seen += count
        if run.seen == run.num_tokens:
            del self._running[request_id]
            key = normalize(run.total / run.num_tokens, dim=0)  # [d]
            self._finished[run.key_id] = KeyPassResult(self._device.to_host(key), run.num_tokens)

    def finish(self, request_ids: set[str]) -> None:
        """Drop these requests, which have ended; an incomplete key will never be completed."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def pop(self, key_id: str) -> KeyPassResult | None:
        """Return a complete key and drop it."""
        return self._finished.pop(key_id, None)
