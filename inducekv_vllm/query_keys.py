"""Query keys r(x) of running key passes: sums over chunks, kept until they are fetched.

Letters: T prompt tokens of a request, d hidden size.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

# Keys that nobody fetched, because the request was aborted after its pass, are dropped from this many on.
MAX_PENDING = 4096


@dataclass
class _Running:
    key_id: str
    num_tokens: int  # T
    seen: int = 0
    total: Tensor | None = None  # [d] float32


@dataclass(frozen=True)
class QueryKey:
    key: Tensor  # [d] float32, unit norm: the mean of the final hidden states of all T tokens, normalised
    num_tokens: int  # T


class QueryKeys:
    """Accumulates the mean over the prompt's final hidden states (paper, Eq. key_rewrite), however it is chunked."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}
        self._finished: OrderedDict[str, QueryKey] = OrderedDict()

    @property
    def running(self) -> bool:
        return bool(self._running)

    @property
    def pending(self) -> int:
        return len(self._finished)

    def wants(self, request_id: str) -> bool:
        return request_id in self._running

    def start(self, request_id: str, key_id: str, num_tokens: int) -> None:
        """A key pass of T tokens begins."""
        self._running[request_id] = _Running(key_id, num_tokens)

    def restart(self, request_id: str) -> None:
        """The request was preempted and computes its prompt again, from the first token."""
        if request_id in self._running:
            run = self._running[request_id]
            self._running[request_id] = _Running(run.key_id, run.num_tokens)

    def add(self, request_id: str, hidden: Tensor) -> None:
        """The next rows [rows, d] of the request's final hidden states, in order."""
        run = self._running[request_id]
        rows = hidden[: run.num_tokens - run.seen].float().sum(0)  # [d]; generated tokens do not count
        run.total = rows if run.total is None else run.total + rows
        run.seen += min(len(hidden), run.num_tokens - run.seen)
        if run.seen == run.num_tokens:
            del self._running[request_id]
            self._finished[run.key_id] = QueryKey(normalize(run.total / run.num_tokens, dim=0), run.num_tokens)
            while len(self._finished) > MAX_PENDING:
                self._finished.popitem(last=False)

    def finish(self, request_ids: set[str]) -> None:
        """These requests are over; a key that is not complete by now never will be."""
        for request_id in request_ids:
            self._running.pop(request_id, None)

    def pop(self, key_id: str) -> QueryKey | None:
        """Hand a complete key over, once."""
        return self._finished.pop(key_id, None)


def key_to_bytes(key: QueryKey) -> bytes:
    """float32 [d] in native byte order; both ends are processes of one machine."""
    return key.key.to("cpu", torch.float32).contiguous().numpy().tobytes()
