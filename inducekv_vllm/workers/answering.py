"""Stored answers in the next token's distribution, as vLLM's logits processors.

They change the rows of requests whose facts were found, and no others. The worker tells them by the request's own
sampling parameters, which vLLM hands to a processor with each request, to both model runners.

Shapes: R rows, V vocabulary, n answers of at most A tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor, LogitsProcRequestState

from ..facts import Answers, mixed, next_tokens
from ..facts.answers import mixed_rows
from ..protocol import EXTRA_ARGS_KEY

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ANSWERS: Final = "inducekv_answers"  # in a request's extra arguments, once its facts are found


def register(config: VllmConfig, *, is_v2: bool) -> None:
    """Let the model runner have the processor. vLLM's runners take none beside drafts."""
    if config.speculative_config is None:
        ours: type[Any] = AnswersOnDevice if is_v2 else AnswersOnHost
        model = config.model_config
        model.logits_processors = [*(model.logits_processors or ()), ours]


def put_answers(params: SamplingParams, answers: Answers) -> None:
    """Put a request's answers where the processors look for them."""
    params.extra_args = {**(params.extra_args or {}), ANSWERS: answers}


def _answers_of(params: SamplingParams) -> Answers | None:
    found: Answers | None = (params.extra_args or {}).get(ANSWERS)
    return found


def _may_have_answers(params: SamplingParams) -> bool:
    return EXTRA_ARGS_KEY in (params.extra_args or {})


class AnswersOnHost(AdapterLogitsProcessor):
    """For the V1 model runner, which keeps generated tokens on the host."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[[list[int], Tensor], Tensor] | None:
        if not _may_have_answers(params):
            return None

        def follow(output_ids: list[int], logits: Tensor) -> Tensor:
            answers = _answers_of(params)
            return logits if answers is None else mixed(logits, answers.weight, next_tokens(answers, output_ids))

        return follow


class AnswersOnDevice(LogitsProcessor):
    """For the V2 model runner, which keeps generated tokens on the device: the host does not know them in time."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._states = req_states
        self._params: dict[int, SamplingParams] = {}  # by request slot
        self._on_device: dict[int, tuple[Answers, _DeviceAnswers]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self._params.pop(req_idx, None)
        self._on_device.pop(req_idx, None)
        if not _may_have_answers(sampling_params):
            return False
        self._params[req_idx] = sampling_params
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        for row, slot in enumerate(ctx.idx_mapping_np.tolist()):  # without drafts, a request has one row
            answers = _answers_of(self._params[slot]) if slot in self._params else None
            if answers is not None:
                stored = self._prepared(slot, answers)
                length = int(self._states.prompt_len.np[slot])
                generated = (ctx.pos[row] + 1 - length).clamp(min=0)  # below 0 in a part of a prompt: no token is taken
                token_ids = self._states.all_token_ids.gpu[slot]
                weight, p_stored = stored.next_tokens(token_ids, generated, length, logits.shape[1])
                logits[row] = mixed_rows(logits[row][None], weight[None], p_stored[None])[0]
        return logits

    def _prepared(self, slot: int, answers: Answers) -> _DeviceAnswers:
        known = self._on_device.get(slot)
        if known is None or known[0] is not answers:
            known = self._on_device[slot] = answers, _DeviceAnswers(answers, self._states.device)
        return known[1]


class _DeviceAnswers:
    """A request's answers as tensors: all is computed on the device."""

    def __init__(self, answers: Answers, device: torch.device) -> None:
        longest = max(map(len, answers.token_ids))
        padded = [[*ids, *[-1] * (longest - len(ids))] for ids in answers.token_ids]
        self._ids = torch.tensor(padded, device=device)  # [n, A] int64, -1 behind the end
        self._shares = torch.tensor(answers.shares, device=device)  # [n]
        self._weight = torch.tensor(answers.weight, device=device)
        self._places = torch.arange(longest, device=device)  # [A]

    def next_tokens(
        self, token_ids: Tensor, generated: Tensor, prompt_length: int, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        """w and p_stored [V] after so many generated tokens, which lie behind the prompt in `token_ids`."""
        places = (self._places + prompt_length).clamp(max=len(token_ids) - 1)
        agrees = ((self._ids == token_ids[places]) | (self._places >= generated)).all(1)  # [n]
        following = self._ids.gather(1, generated.clamp(max=len(self._places) - 1).expand(len(self._ids), 1))[:, 0]
        shares = self._shares * (agrees & (following >= 0) & (generated < len(self._places)))  # [n]
        stored = torch.zeros(vocabulary, device=shares.device).index_add_(0, following.clamp(min=0), shares)
        return self._weight * (shares.sum() > 0), stored / shares.sum().clamp_min(1e-30)
