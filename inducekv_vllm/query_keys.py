"""Query keys of running key passes: sums over chunks, kept until they are fetched.

A key has two parts: row 0 is r(x), the mean over all prompt tokens; row 1 the mean over the text tokens alone.

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
    is_text: Tensor  # [T] bool
    seen: int = 0
    total: Tensor | float = 0.0  # [2, d] float32, once a row has been seen

    @property
    def num_tokens(self) -> int:
        return len(self.is_text)


@dataclass(frozen=True)
class QueryKey:
    key: (
        Tensor  # [2, d] float32: means of the final hidden states, normalised; row 1 is zeros for a prompt without text
    )
    num_tokens: int  # T


class QueryKeys:
    """Accumulates the means over the prompt's final hidden states (paper, Eq. key_rewrite), however it is chunked."""

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

    def start(self, request_id: str, key_id: str, is_text: Tensor) -> None:
        """A key pass begins; `is_text` [T] bool says which of its tokens are no placeholders."""
        self._running[request_id] = _Running(key_id, is_text)

    def restart(self, request_id: str) -> None:
        """The request was preempted and computes its prompt again, from the first token."""
        if request_id in self._running:
            run = self._running[request_id]
            self._running[request_id] = _Running(run.key_id, run.is_text)

    def add(self, request_id: str, hidden: Tensor) -> None:
        """The next rows [rows, d] of the request's final hidden states, in order."""
        run = self._running[request_id]
        rows = hidden[: run.num_tokens - run.seen].float()  # [rows, d]; generated tokens do not count
        text = rows[run.is_text[run.seen : run.seen + len(rows)]]  # [text rows, d]
        run.total = run.total + torch.stack([rows.sum(0), text.sum(0)])
        run.seen += len(rows)
        if run.seen == run.num_tokens:
            del self._running[request_id]
            counts = torch.tensor([run.num_tokens, max(int(run.is_text.sum()), 1)])[:, None].to(run.total)  # [2, 1]
            self._finished[run.key_id] = QueryKey(normalize(run.total / counts, dim=1), run.num_tokens)
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
    """float32 [2, d] in native byte order; both ends are processes of one machine."""
    return key.key.to("cpu", torch.float32).contiguous().numpy().tobytes()
