"""Query keys of running key passes: sums over prompt chunks, kept until the API process fetches the key.

A step only adds on the device. A finished key is on its way to the host; nobody but its reader waits for it.

Shapes: T prompt tokens of a request, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from cachetools import FIFOCache
from torch import Tensor
from torch.nn.functional import normalize

from .block_sums import BlockSums
from .device import Device, HostCopy


@dataclass
class _Running:
    key_id: str
    num_tokens: int  # T
    num_text: int  # of these, tokens that do not stand for media
    cached_blocks: Sequence[int]  # hold the first tokens, which the key pass does not compute
    seen: int  # tokens so far
    total: Tensor | float = 0.0  # [2, d] float32, once a row has been seen


@dataclass(frozen=True)
class QueryKey:
    """Normalised means of a prompt's final hidden states."""

    copy: HostCopy  # of the key
    num_tokens: int  # T

    @property
    def key(self) -> Tensor:
        """[2, d] float32: over all tokens, over the text tokens (zeros for a prompt without text)."""
        return self.copy.wait()

    def to_bytes(self) -> bytes:
        """Serialise as float32 [2, d] in native byte order; both processes run on one machine."""
        return self.key.contiguous().numpy().tobytes()


class QueryKeyAccumulator:
    """Accumulates the means over the final hidden states (paper, Eq. key_rewrite) of prompts in any chunks."""

    def __init__(self, device: Device, max_pending: int = 4096, block_sums: BlockSums | None = None) -> None:
        """A request aborted after its key pass never fetches its key; beyond `max_pending` the oldest are dropped.

        `block_sums` are needed for key passes that read the prefix cache.
        """
        self._device = device
        self._block_sums = block_sums
        self._running: dict[str, _Running] = {}
        self._finished: FIFOCache[str, QueryKey] = FIFOCache(max_pending)

    @property
    def any_running(self) -> bool:
        return bool(self._running)

    @property
    def pending(self) -> int:
        return len(self._finished)

    def is_running(self, request_id: str) -> bool:
        return request_id in self._running

    def start(
        self,
        request_id: str,
        key_id: str,
        num_tokens: int,
        num_text: int,
        num_cached: int = 0,
        cached_blocks: Sequence[int] = (),
    ) -> None:
        """Begin a key pass.

        Args:
            num_tokens: T.
            num_text: how many of them are not placeholders.
            num_cached: tokens that are read from the prefix cache.
            cached_blocks: the KV-cache blocks that hold them, all full.
        """
        self._running[request_id] = _Running(key_id, num_tokens, num_text, cached_blocks, num_cached)

    def restart(self, request_id: str, num_cached: int = 0, cached_blocks: Sequence[int] = ()) -> None:
        """Begin a running key pass again: the request was preempted and computes its prompt anew."""
        run = self._running[request_id]
        self.start(request_id, run.key_id, run.num_tokens, run.num_text, num_cached, cached_blocks)

    def add(self, request_id: str, hidden: Tensor, is_text: Tensor) -> None:
        """Add the request's next rows, in order: final hidden states [rows, d], and which are of text, bool [rows].

        After the step's rows have been added to the sums by block: another request of the same step may have computed
        the cached blocks.
        """
        run = self._running[request_id]
        count = min(len(hidden), run.num_tokens - run.seen)  # without generated tokens
        rows = hidden[:count].float()  # [count, d]
        run.total = run.total + torch.stack([rows.sum(0), (rows * is_text[:count, None]).sum(0)])
        run.seen += count
        if run.seen == run.num_tokens:
            del self._running[request_id]
            self._finish(run)

    def _finish(self, run: _Running) -> None:
        if run.cached_blocks:
            assert self._block_sums is not None
            run.total = run.total + self._block_sums.of(self._device.index(list(run.cached_blocks)))
        assert isinstance(run.total, Tensor)
        means = torch.stack([run.total[0] / run.num_tokens, run.total[1] / max(run.num_text, 1)])
        self._finished[run.key_id] = QueryKey(self._device.to_host(normalize(means, dim=1)), run.num_tokens)

    def finish(self, request_ids: set[str]) -> None:
        """Drop these requests, which have ended; an incomplete key will never be completed."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def pop(self, key_id: str) -> QueryKey | None:
        """Return a complete key and drop it."""
        return self._finished.pop(key_id, None)
