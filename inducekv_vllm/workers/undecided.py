"""Requests whose memory is not decided yet: what their prompts tell a bundle's index and gate.

The query key is the mean of the final hidden states over the whole prompt (paper, Eq. key_rewrite); a step only adds to
it on the device. A gate's evidence and the state of pictures are read from the KV cache, once all of the prompt is
there, whoever has computed it. All are on their way to the host then; nobody but the first rank waits for them.

Shapes: T prompt tokens of a request, t of them deciding, d hidden size, H evidence of a gate, F features of a layer's
values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import starmap
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..attention.resident_bundle import ResidentBundle
from ..attention.resident_gate import ResidentGate
from ..bundle.lookup import QueryFeatures
from ..errors import InduceKVError
from ..facts.pictures import LAYER
from ..gate import PIECE, TurnMarks, deciding_tokens, in_pieces, last_averaged
from ..host.device import Device, HostCopy
from ..host.logs import logger_of
from ..host.runner import StepRows
from ..protocol import DecideSpec, Decision
from .cached_values import CachedValues

logger = logger_of(__name__)
_NO_MARKS: Final = TurnMarks((), None)  # all of a prompt
Blocks = Sequence[Sequence[int]]  # of each group of the KV cache, a request's blocks in order


@dataclass
class Undecided:
    """One request."""

    spec: DecideSpec
    bundle: ResidentBundle | None  # None: what its pictures are like is all that is asked
    token_ids: Sequence[int]  # [T]
    blocks: list[list[int]]
    seen: int = 0  # tokens whose hidden states are in `total`
    total: Tensor | float = 0.0  # [d] float32, once a row has been seen
    key: HostCopy | None = None  # [d]
    evidence: HostCopy | None = None  # [H]
    picture: HostCopy | None = None  # [F]
    refusal: InduceKVError | None = None  # why nothing can be decided
    decision: Decision | None = None  # if it was taken before or in the forward pass

    def features(self) -> QueryFeatures:
        """Wait for what the prompt tells. Raises InduceKVError: it is not finite, because the model overflowed."""
        if self.refusal is not None:
            raise self.refusal
        found = [None if copy is None else copy.wait() for copy in (self.key, self.evidence, self.picture)]
        if any(each is not None and not bool(each.isfinite().all()) for each in found):
            raise InduceKVError("the model's hidden states for this prompt are not finite, so it has no query key")
        key, evidence, picture = (None if each is None else each.numpy() for each in found)
        return QueryFeatures(key=key, evidence=evidence, picture=picture)

    @property
    def picture_marks(self) -> TurnMarks | None:
        """By which the turn is found whose pictures decide; None if no pictures do."""
        return _NO_MARKS if self.bundle is None else self.bundle.picture_marks


class UndecidedRequests:
    """The requests of a worker; it calls every method in the order of its steps."""

    def __init__(
        self,
        values: CachedValues,
        placeholders: Collection[int],
        add_up: Callable[[Tensor], Tensor],
        all_heads: Callable[[Tensor], Tensor],
        device: Device,
    ) -> None:
        """
        Args:
            placeholders: the ids of tokens that stand for media.
            add_up: the sum of a tensor over the ranks.
            all_heads: the features [F] of all KV heads, from those of this rank's, of which 0 are left out.
        """
        self._values, self._placeholders, self._device = values, placeholders, device
        self._add_up, self._all_heads = add_up, all_heads
        self._requests: dict[str, Undecided] = {}
        self._decided: set[str] = set()  # running requests, which may come as new ones after a preemption

    def __len__(self) -> int:
        return len(self._requests) + len(self._decided)

    def knows(self, request_id: str) -> bool:
        """Whether a request is undecided, or has been."""
        return request_id in self._requests or request_id in self._decided

    def start(
        self,
        request_id: str,
        spec: DecideSpec,
        bundle: ResidentBundle | None,
        token_ids: Sequence[int],
        blocks: Blocks,
    ) -> Undecided:
        started = Undecided(spec, bundle, token_ids, [list(each) for each in blocks])
        self._requests[request_id] = started
        return started

    def settle(self, request_id: str) -> None:
        """A request, perhaps a new one, is decided."""
        self._requests.pop(request_id, None)
        self._decided.add(request_id)

    def extend(self, request_id: str, blocks: Blocks) -> None:
        """A request, perhaps one of these, has got more blocks."""
        if (request := self._requests.get(request_id)) is not None:
            for own, new in zip(request.blocks, blocks, strict=True):
                own.extend(new)

    def restart(self, request_id: str, blocks: Blocks) -> None:
        """A request, perhaps one of these, was preempted and goes on with these blocks alone."""
        if (request := self._requests.get(request_id)) is not None:
            request.blocks = [list(each) for each in blocks]
            request.seen, request.total = 0, 0.0

    def finish(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)
            self._decided.discard(request_id)

    def complete(self, rows: StepRows, final_hidden: Callable[[int], Tensor | None]) -> list[tuple[str, Undecided]]:
        """The requests whose last prompt token is in this step, whose forward pass is queued: they are decided.

        Args:
            final_hidden: the step's final hidden states [rows, d] by their number.
        """
        if not self._requests:
            return []
        hidden, starts = None, rows.starts
        for number, request_id in enumerate(rows.request_ids):
            if (request := self._requests.get(request_id)) is not None and request.spec.retrieval:
                hidden = final_hidden(starts[-1]) if hidden is None else hidden
                assert hidden is not None
                self._add(request, hidden[starts[number] : starts[number + 1]])
        completed = self.completing(rows)
        for request_id, request in completed:
            if request.decision is None:
                self.find(request)
            self.settle(request_id)
        return completed

    def completing(self, rows: StepRows) -> list[tuple[str, Undecided]]:
        """The requests whose last prompt token is in this step."""
        if not self._requests:
            return []
        return [
            (request_id, request)
            for request_id, computed, scheduled in zip(
                rows.request_ids, rows.num_computed, rows.num_scheduled, strict=True
            )
            if (request := self._requests.get(request_id)) is not None
            and computed + scheduled >= len(request.token_ids)
        ]

    def _add(self, request: Undecided, hidden: Tensor) -> None:
        """Add the final hidden states [rows, d] of the request's next rows, in order."""
        request.total = request.total + hidden.float().sum(0)
        request.seen += len(hidden)

    def find(self, request: Undecided) -> None:
        """Send what the prompt tells on its way to the host; what raises is the request's refusal."""
        try:
            self._find(request)
        except Exception as error:
            request.refusal = failure_of(error)

    def _find(self, request: Undecided) -> None:
        """The values that the gate looks at are in the KV cache."""
        if request.spec.retrieval:
            T = len(request.token_ids)
            assert request.seen == T, f"the key of {T} tokens has seen {request.seen}"
            assert isinstance(request.total, Tensor)
            request.key = self._device.to_host(normalize(request.total / T, dim=0))
        if request.picture_marks is not None:
            self._find_picture(request, request.picture_marks)
        if request.bundle is not None and (gate := request.bundle.gate) is not None:
            request.evidence = self._device.to_host(self._evidence(request, gate))

    def _evidence(self, request: Undecided, gate: ResidentGate) -> Tensor:
        """[H]; a long prompt in pieces, because vLLM has left no memory for the values of all of it."""

        def of_piece(text: list[int], media: list[int]) -> Tensor:
            values = self._values.read(gate.layers, request.blocks, text + media)  # [t, S, F of this rank]
            return gate.scores.evidence(last_averaged(values, len(text)), self._add_up)

        pieces = in_pieces(*deciding_tokens(request.token_ids, gate.marks, self._placeholders))
        return reduce(torch.maximum, starmap(of_piece, pieces))

    def _find_picture(self, request: Undecided, marks: TurnMarks) -> None:
        media = deciding_tokens(request.token_ids, marks, self._placeholders).media
        if media and (reason := self._values.refusal(LAYER)) is not None:
            raise InduceKVError(f"pictures cannot be told from each other by layer {LAYER}: {reason}")
        if media:
            pieces = (media[at : at + PIECE] for at in range(0, len(media), PIECE))
            # Of this rank's features, [F] each.
            sums = [self._values.read([LAYER], request.blocks, piece).sum((0, 1)) for piece in pieces]
            request.picture = self._device.to_host(self._all_heads(torch.stack(sums).sum(0) / len(media)))


def failure_of(error: Exception) -> InduceKVError:
    """Why a decision ends its request, and nothing else: an error that nobody expected is logged."""
    if isinstance(error, InduceKVError):
        return error
    logger.exception("the decision about a request failed")
    return InduceKVError(f"the decision about this request failed ({type(error).__name__}); the server's log has more")
