"""What the two passes of a request with memory carry: options in, sampling parameters and prompts out.

Shared by the HTTP server's engine client (`engine.py`) and the offline helper (`offline.py`).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput
from vllm.multimodal.utils import argsort_mm_positions
from vllm.sampling_params import RequestOutputKind, SamplingParams

from ..retrieval import FloatArray
from .memory_index import Memory, Recall
from .wire import EXTRA_ARGS_KEY, KeyOrder, MemoryOrder

OPTION_PREFIX = "inducekv_"
TRACE_OPTION = "inducekv_trace"
TOP_K_OPTION = "inducekv_top_k"


@dataclass(frozen=True)
class MemoryOptions:
    """What one request asks of its memory, through OpenAI's extra body field `vllm_xargs`."""

    trace: bool = False
    top_k: int | None = None  # None: the server's setting


def read_options(params: SamplingParams, num_entries: int) -> MemoryOptions:
    """The options of a request to a memory of B = `num_entries`.

    Raises:
        VLLMValidationError: an unknown option, a value out of range, or use of the worker's reserved key.
    """
    given = _own_arguments(params)
    known = {TRACE_OPTION, TOP_K_OPTION}
    if unknown := sorted(given.keys() - known):
        raise VLLMValidationError(
            f"unknown argument {unknown[0]!r} in vllm_xargs; a memory takes {', '.join(sorted(known))}",
            parameter="vllm_xargs",
        )
    trace, top_k = given.get(TRACE_OPTION, 0), given.get(TOP_K_OPTION)
    if not isinstance(trace, int) or trace not in (0, 1):
        raise VLLMValidationError(f"{TRACE_OPTION} must be 0 or 1, found {trace!r}", parameter="vllm_xargs")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= num_entries):
        raise VLLMValidationError(
            f"{TOP_K_OPTION} must be a whole number from 1 to {num_entries}, the memory's entries; found {top_k!r}",
            parameter="vllm_xargs",
        )
    return MemoryOptions(trace=bool(trace), top_k=top_k)


def refuse_options(params: object) -> None:
    """For a request without memory: raises VLLMValidationError where it carries an argument of ours."""
    if isinstance(params, SamplingParams) and (given := _own_arguments(params)):
        raise VLLMValidationError(
            f"{min(given)!r} in vllm_xargs is an argument for a memory bundle, but the request's model has no memory",
            parameter="vllm_xargs",
        )


def _own_arguments(params: SamplingParams) -> dict[str, Any]:
    arguments = params.extra_args or {}
    if EXTRA_ARGS_KEY in arguments:
        raise VLLMValidationError(f"the argument {EXTRA_ARGS_KEY!r} is reserved", parameter="vllm_xargs")
    return {name: value for name, value in arguments.items() if name.startswith(OPTION_PREFIX)}


def require_rendered(prompt: object) -> EngineInput:
    """The prompt as vLLM's renderer leaves it.

    Raises:
        VLLMValidationError: a raw prompt, streamed input, or a prompt of another kind than tokens and media.
    """
    if not isinstance(prompt, dict) or "type" not in prompt:
        raise VLLMValidationError(
            f"a memory bundle needs a rendered prompt, found {type(prompt).__name__}; streamed input is not supported"
        )
    if prompt["type"] not in ("token", "multimodal"):
        raise VLLMValidationError(f"a memory bundle cannot be used with a prompt of type {prompt['type']!r}")
    return cast(EngineInput, prompt)


def prompt_identity(prompt: EngineInput, adapter: str | None) -> bytes:
    """A digest that two prompts share only when their query keys are the same.

    The user's cache salt is part of it: who may not share prefix blocks may not learn of a shared key either.
    """
    fields = cast(Mapping[str, Any], prompt)
    sha = hashlib.sha256(array("q", fields["prompt_token_ids"]).tobytes())
    for modality, index in mm_items(prompt):
        offset = fields["mm_placeholders"][modality][index].offset
        sha.update(f"\n{modality} {offset} {fields['mm_hashes'][modality][index]}".encode())
    sha.update(repr((adapter, fields.get("cache_salt"))).encode())
    return sha.digest()


def mm_items(prompt: EngineInput) -> list[tuple[str, int]]:
    """(modality, index) of every picture and so on, in the order in which vLLM sends them to the engine."""
    if prompt["type"] != "multimodal":
        return []
    return argsort_mm_positions(prompt["mm_placeholders"])


def key_pass_params(key_id: str) -> SamplingParams:
    """The first pass: prefill the whole prompt, leave its query key with the worker under `key_id`, answer nothing.

    It does not read the prefix cache, because the key is a mean over the states of *all* prompt tokens, but fills it.
    """
    return SamplingParams(
        n=1,
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        watermarking=False,
        skip_reading_prefix_cache=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={EXTRA_ARGS_KEY: KeyOrder(key_id).to_extra_args()},
    )


def order_memory(memory: Memory, recall: Recall, remainder: bool) -> MemoryOrder | None:
    """What the second pass asks of the worker; None where the memory's gate is closed.

    `remainder` is whether entries that were not retrieved stay in the softmax with alpha = 0; it has no meaning, and
    is not passed on, for the weighting "prior", in which alpha = 0 is absence.
    """
    if (retrieval := recall.retrieval) is None:
        return None
    return MemoryOrder(
        bundle=memory.digest,
        entries=tuple(retrieval.entries.tolist()),
        weights=tuple(retrieval.weights.tolist()),  # float32 as float64: exact
        remainder=remainder and memory.weighting == "sqrt",
    )


def answer_pass_params(params: SamplingParams, order: MemoryOrder | None) -> SamplingParams:
    """The second pass: the user's own parameters, and what to inject if anything. `params` is left as it is."""
    mine = params.clone()
    kept = {name: value for name, value in (params.extra_args or {}).items() if not name.startswith(OPTION_PREFIX)}
    if order is not None:
        kept[EXTRA_ARGS_KEY] = order.to_extra_args()
    mine.extra_args = kept or None
    return mine


def answer_pass_prompt(prompt: EngineInput, order: MemoryOrder | None) -> EngineInput:
    """The same prompt under a prefix-cache salt of its own: every K and V depends on what is injected.

    Where nothing is, it is the prompt itself: its first pass has just filled the prefix cache for it.
    """
    if order is None:
        return prompt
    salt = hashlib.sha256(repr((prompt.get("cache_salt"), order.content)).encode())
    return cast(EngineInput, {**prompt, "cache_salt": salt.hexdigest()})


def decode_key(answers: list[dict[str, Any]]) -> FloatArray:
    """The query key [2, d] float32 from the workers' answers to `inducekv_pop_key`, one per rank.

    Raises:
        RuntimeError: a rank has no key, or the key is not finite: the model overflowed, or the worker is broken.
    """
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise RuntimeError(f"rank {rank} has no query key: {answer['error']}")
    key = np.frombuffer(answers[0]["key"], dtype=np.float32).reshape(2, -1)
    if not np.isfinite(key).all():
        raise RuntimeError("the model's hidden states for this prompt are not finite, so it has no query key")
    return key
