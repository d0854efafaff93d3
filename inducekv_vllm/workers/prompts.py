"""What a prompt tells a bundle's index, gate and facts, on its way to the host.

The query key is the mean of the final hidden states over the whole prompt (paper, Eq. key_rewrite); a step only adds to
it on the device. A gate's evidence and the state of pictures are read from the KV cache, once all of the prompt is
there, whoever has computed it. Nobody but the first rank waits for any of them.

Shapes: T prompt tokens of a request, t of them deciding, d hidden size, H evidence of a gate, F features of a layer's
values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ..attention.resident_gate import ResidentGate
from ..errors import InduceKVError
from ..facts.pictures import LAYER
from ..gate import PIECE, TurnMarks, deciding_tokens, prompt_evidence
from ..vllm_seams.device import Device, HostCopy
from ..vllm_seams.logs import logger_of
from .cached_values import CachedValues
from .requests import WorkerRequest

logger = logger_of(__name__)
_NO_MARKS: Final = TurnMarks((), None)  # all of a prompt


class PromptReader:
    """Reads the prompts of a worker that are complete."""

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

    def read(self, request: WorkerRequest) -> None:
        """Send what the prompt tells on its way to the host; what raises is the request's refusal."""
        try:
            self._read(request)
        except Exception as error:
            request.features.refusal = failure_of(error)

    def _read(self, request: WorkerRequest) -> None:
        """The values that the gate looks at are in the KV cache."""
        features = request.features
        if request.needs_key:
            T = len(request.prompt)
            assert features.seen == T, f"the key of {T} tokens has seen {features.seen}"
            assert isinstance(features.total, Tensor)
            features.key = self._device.to_host(normalize(features.total / T, dim=0))
        for memory in request.memories:
            bundle = memory.bundle
            marks = _NO_MARKS if bundle is None else bundle.picture_marks
            picture = None if marks is None else self._picture(request, marks)
            gate = None if bundle is None else bundle.gate
            evidence = None if gate is None else self._device.to_host(self._evidence(request, gate))
            features.for_memories.append((evidence, picture))

    def _evidence(self, request: WorkerRequest, gate: ResidentGate) -> Tensor:
        """[H], without that of words: the host has those."""
        read = partial(self._values.read, gate.layers, request.blocks)  # [t, S, F of this rank]
        return prompt_evidence(
            request.prompt,
            gate.marks,
            gate.scores,
            self._placeholders,
            read,
            self._add_up,
            gate.means,
            self._device.index,
        )

    def _picture(self, request: WorkerRequest, marks: TurnMarks) -> HostCopy | None:
        """The state [F] of the pictures in the turn that is found by these marks, if there are any."""
        media = deciding_tokens(request.prompt, marks, self._placeholders).media
        if not media:
            return None
        if (reason := self._values.refusal(LAYER)) is not None:
            raise InduceKVError(f"pictures cannot be told from each other by layer {LAYER}: {reason}")
        pieces: list[Sequence[int]] = [media[at : at + PIECE] for at in range(0, len(media), PIECE)]
        # Of this rank's features, [F] each.
        sums = [self._values.read([LAYER], request.blocks, piece).sum((0, 1)) for piece in pieces]
        return self._device.to_host(self._all_heads(torch.stack(sums).sum(0) / len(media)))


def failure_of(error: Exception) -> InduceKVError:
    """Why a decision ends its request, and nothing else: an error that nobody expected is logged."""
    if isinstance(error, InduceKVError):
        return error
    logger.exception("the decision about a request failed")
    return InduceKVError(f"the decision about this request failed ({type(error).__name__}); the server's log has more")
