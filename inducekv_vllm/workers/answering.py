"""Stored answers said token by token, as vLLM's logits processors.

They change the rows of requests whose fact was found, and no others. The worker tells them by the request's own
sampling parameters, which vLLM hands to a processor with each request, to both model runners. In a step without such a
request they cost nothing: the V2 runner calls none.

Shapes: R rows, V vocabulary, T tokens of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor, LogitsProcRequestState

from ..backbone.saying import next_token, said
from ..protocol import EXTRA_ARGS_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ANSWER: Final = "inducekv_answer"  # in a request's extra arguments, once its fact is found


def register(config: VllmConfig, *, is_v2: bool) -> None:
    """Let the model runner have the processor. vLLM's runners take none beside drafts."""
    if config.speculative_config is None:
        ours: type[Any] = AnswerOnDevice if is_v2 else AnswerOnHost
        model = config.model_config
        model.logits_processors = [*(model.logits_processors or ()), ours]


def put_answer(params: SamplingParams, answer: tuple[int, ...]) -> None:
    """Put a request's answer where the processors look for it."""
    params.extra_args = {**(params.extra_args or {}), ANSWER: answer}


def _answer_of(params: SamplingParams) -> tuple[int, ...] | None:
    found: tuple[int, ...] | None = (params.extra_args or {}).get(ANSWER)
    return found


def _may_have_answer(params: SamplingParams) -> bool:
    return EXTRA_ARGS_KEY in (params.extra_args or {})


class AnswerOnHost(AdapterLogitsProcessor):
    """For the V1 model runner, which keeps generated tokens on the host."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[[list[int], Tensor], Tensor] | None:
        if not _may_have_answer(params):
            return None

        def follow(output_ids: list[int], logits: Tensor) -> Tensor:
            token = next_token(_answer_of(params) or (), output_ids)
            return logits if token is None else said(logits, token)

        return follow

    def apply(self, logits: Tensor) -> Tensor:
        """Write the rows that change alone: vLLM's own writes every row that may."""
        for row, follow in self.req_info.items():
            before = logits[row]
            if (after := follow(before)) is not before:
                logits[row] = after
        return logits


class AnswerOnDevice(LogitsProcessor):
    """For the V2 model runner, which keeps generated tokens on the device: the host does not know them in time."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._states = req_states
        self._params: dict[int, SamplingParams] = {}  # by request slot
        self._on_device: dict[int, tuple[tuple[int, ...], Tensor]] = {}  # answers, also as tensors [T] int64

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Whether it has an answer now; of one that is found later the runner hears (`RunnerTables.process_logits`)."""
        self._params.pop(req_idx, None)
        self._on_device.pop(req_idx, None)
        if _may_have_answer(sampling_params):
            self._params[req_idx] = sampling_params
        return _answer_of(sampling_params) is not None

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):  # without drafts, a request has one row
            answer = _answer_of(self._params[slot]) if slot in self._params else None
            if answer is not None:
                length = int(self._states.prompt_len.np[slot])
                generated = (ctx.pos[row] + 1 - length).clamp(min=0)  # below 0 in a part of a prompt: no token is taken
                token_ids = self._states.all_token_ids.gpu[slot]
                logits[row] = said_on_device(logits[row], self._prepared(slot, answer), token_ids, generated, length)
        return logits

    def _prepared(self, slot: int, answer: tuple[int, ...]) -> Tensor:
        known = self._on_device.get(slot)
        if known is None or known[0] is not answer:
            known = self._on_device[slot] = answer, torch.tensor(answer, device=self._states.device)
        return known[1]


def said_on_device(logits: Tensor, answer: Tensor, token_ids: Tensor, generated: Tensor, prompt_length: int) -> Tensor:
    """`facts.said` for what follows in the answer [T] after so many generated tokens. Nothing is read back to the host.

    Args:
        logits: [V]
        token_ids: of the prompt, and behind it of what was generated.
        generated: [], the number of tokens.
    """
    places = torch.arange(len(answer), device=answer.device)
    own = token_ids[(places + prompt_length).clamp(max=len(token_ids) - 1)]
    agrees = ((answer == own) | (places >= generated)).all() & (generated < len(answer))
    token = answer[generated.clamp(max=len(answer) - 1)]
    is_token = torch.arange(len(logits), device=logits.device) == token
    certain = torch.where(is_token, 0.0, -math.inf).to(logits.dtype)
    return torch.where(agrees & (logits[token] > -math.inf), certain, logits)
