"""What a prompt tells a bundle's index, gate and facts, on its way to the host.

The query key is the mean of the final hidden states over the whole prompt (paper, Eq. key_rewrite); a step only adds to
it on the device. A gate's evidence is read from the KV cache, once all of the prompt is there, whoever has computed it.
Nobody but the first rank waits for either.

Shapes: T prompt tokens of a request, t of them deciding, d hidden size, H evidence of a gate, F features of a layer's
values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn.functional import normalize

from ..attention.resident_gate import ResidentGate
from ..errors import InduceKVError
from ..gate import PIECE, WINDOW, deciding_tokens, evidence_of_texts, prompt_evidence
from ..vllm_seams.device import Device
from ..vllm_seams.logs import logger_of
from .cached_values import CachedValues
from .requests import WorkerRequest

logger = logger_of(__name__)


class PromptReader:
    """Reads the prompts of a worker that are complete."""

    def __init__(
        self,
        values: CachedValues,
        placeholders: Collection[int],
        add_up: Callable[[Tensor], Tensor],
        device: Device,
    ) -> None:
        """
        Args:
            placeholders: the ids of tokens that stand for media.
            add_up: the sum of a tensor over the ranks.
        """
        self._values, self._placeholders, self._device = values, placeholders, device
        self._add_up = add_up

    def read(self, requests: Sequence[WorkerRequest]) -> None:
        """Send what the prompts tell on its way to the host; what raises is the request's refusal.

        The values that gates look at are in the KV cache.
        """
        for request in requests:
            try:
                self._read(request)
            except Exception as error:
                request.features.refusal = failure_of(error)
        for gate, questions in by_gate(requests, self._placeholders):
            try:
                self._read_evidence(gate, questions)
            except Exception as error:
                for question in questions:
                    question.request.features.refusal = failure_of(error)

    def _read(self, request: WorkerRequest) -> None:
        """All but the evidence for gates."""
        features = request.features
        if request.needs_key:
            T = len(request.prompt)
            assert features.seen == T, f"the key of {T} tokens has seen {features.seen}"
            assert isinstance(features.total, Tensor)
            features.key = self._device.to_host(normalize(features.total / T, dim=0))

    def _read_evidence(self, gate: ResidentGate, questions: Sequence[Question]) -> None:
        """[H] for each, without that of words: the host has those. Several questions share all launches."""
        if len(questions) == 1:
            request = questions[0].request
            read = partial(self._values.read, gate.layers, request.blocks)  # [t, S, F of this rank]
            prompt = request.prompt, gate.marks, gate.scores, self._placeholders
            evidence = prompt_evidence(*prompt, read, self._add_up, gate.means, self._device.index)[None]
        else:
            values = self._values.read_several(gate.layers, [(each.request.blocks, each.text) for each in questions])
            texts = [each.tokens for each in questions]
            evidence = evidence_of_texts(texts, gate.scores, values, self._add_up, gate.means, self._device.index)
        copy = self._device.to_host(evidence)  # [n, H]
        for number, question in enumerate(questions):
            question.request.features.evidence[question.memory] = copy, number


@dataclass(frozen=True)
class Question:
    """What a prompt tells the gate of one of its request's memories."""

    request: WorkerRequest
    memory: int  # its number
    text: list[int]  # positions

    @property
    def tokens(self) -> list[int]:
        return [self.request.prompt[at] for at in self.text]


def by_gate(
    requests: Sequence[WorkerRequest], placeholders: Collection[int]
) -> Iterator[tuple[ResidentGate, list[Question]]]:
    """The questions to each gate, together those of short texts, up to `PIECE` tokens; others by themselves."""
    together: dict[int, tuple[ResidentGate, list[Question]]] = {}  # by the identity of the gate
    asked = ((request, *each) for request in requests for each in enumerate(request.memories))
    for request, number, memory in asked:
        if request.features.refusal is not None or (gate := memory.bundle.gate) is None:
            continue
        text, media = deciding_tokens(request.prompt, gate.marks, placeholders)
        question = Question(request, number, text)
        if media or not WINDOW <= len(text) <= PIECE:
            yield gate, [question]
            continue
        _, others = together.setdefault(id(gate), (gate, []))
        if sum(len(each.text) for each in others) + len(text) > PIECE:
            yield together.pop(id(gate))
            _, others = together.setdefault(id(gate), (gate, []))
        others.append(question)
    yield from together.values()


def failure_of(error: Exception) -> InduceKVError:
    """Why a decision ends its request, and nothing else: an error that nobody expected is logged."""
    if isinstance(error, InduceKVError):
        return error
    logger.exception("the decision about a request failed")
    return InduceKVError(f"the decision about this request failed ({type(error).__name__}); the server's log has more")
