"""The two passes of a request with memory: its options, and the sampling parameters and prompt of each pass.

The engine client (`two_pass.py`) and the offline helper (`offline.py`) share this module.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput
from vllm.multimodal.utils import argsort_mm_positions
from vllm.sampling_params import RequestOutputKind, SamplingParams

from ..bundle.activation import first_active_position
from ..retrieval.page_terms import FloatArray
from .memory_index import MemoryIndex, MemoryLookup, QueryFeatures
from .wire import EXTRA_ARGS_KEY, InjectionSpec, KeyPassSpec

OPTION_PREFIX = "inducekv_"
TRACE_OPTION = "inducekv_trace"
TOP_K_OPTION = "inducekv_top_k"


@dataclass(frozen=True)
class MemoryOptions:
    """A request's options for its memory, from the extra body field `vllm_xargs`."""

    trace: bool = False
    top_k: int | None = None  # None for the server's setting


def read_options(params: SamplingParams, num_entries: int) -> MemoryOptions:
    """Read and check the options of a request to a memory with B = `num_entries`.

    Raises:
        VLLMValidationError: an option is unknown or out of range, or the worker's reserved key is used.
    """
    options = _own_arguments(params)
    supported = {TRACE_OPTION, TOP_K_OPTION}
    if unknown := sorted(options.keys() - supported):
        raise VLLMValidationError(
            f"unknown argument {unknown[0]!r} in vllm_xargs; a memory takes {', '.join(sorted(supported))}",
            parameter="vllm_xargs",
        )
    trace, top_k = options.get(TRACE_OPTION, 0), options.get(TOP_K_OPTION)
    if not isinstance(trace, int) or trace not in (0, 1):
        raise VLLMValidationError(f"{TRACE_OPTION} must be 0 or 1, found {trace!r}", parameter="vllm_xargs")
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or not 1 <= top_k <= num_entries):
        raise VLLMValidationError(
            f"{TOP_K_OPTION} must be a whole number from 1 to {num_entries}, the memory's entries; found {top_k!r}",
            parameter="vllm_xargs",
        )
    return MemoryOptions(trace=bool(trace), top_k=top_k)


def refuse_options(params: object) -> None:
    """Raise VLLMValidationError if a request without memory has options for one."""
    if isinstance(params, SamplingParams) and (options := _own_arguments(params)):
        raise VLLMValidationError(
            f"{min(options)!r} in vllm_xargs is an argument for a memory bundle, but the request's model has no memory",
            parameter="vllm_xargs",
        )


def _own_arguments(params: SamplingParams) -> dict[str, Any]:
    arguments = params.extra_args or {}
    if EXTRA_ARGS_KEY in arguments:
        raise VLLMValidationError(f"the argument {EXTRA_ARGS_KEY!r} is reserved", parameter="vllm_xargs")
    return {name: value for name, value in arguments.items() if name.startswith(OPTION_PREFIX)}


def require_rendered(prompt: object) -> EngineInput:
    """Check that the prompt has been rendered by vLLM.

    Raises:
        VLLMValidationError: the prompt is raw, streamed, or consists of anything but tokens and media.
    """
    if not isinstance(prompt, dict) or "type" not in prompt:
        raise VLLMValidationError(
            f"a memory bundle needs a rendered prompt, found {type(prompt).__name__}; streamed input is not supported"
        )
    if prompt["type"] not in ("token", "multimodal"):
        raise VLLMValidationError(f"a memory bundle cannot be used with a prompt of type {prompt['type']!r}")
    return cast(EngineInput, prompt)


def prompt_identity(
    prompt: EngineInput, adapter: str | None, gate: str | None = None, retrieval: bool = True, owner: str = ""
) -> bytes:
    """Compute a digest that two prompts share only if their key passes find the same and they have one owner.

    It includes the user's cache salt, because users who must not share prefix blocks must not share keys either.

    Args:
        gate: digest of the bundle whose gate is asked.
        retrieval: whether the query key for the retrieval is computed.
    """
    fields = cast(Mapping[str, Any], prompt)
    sha = hashlib.sha256(array("q", fields["prompt_token_ids"]).tobytes())
    for modality, index in mm_items(prompt):
        offset = fields["mm_placeholders"][modality][index].offset
        sha.update(f"\n{modality} {offset} {fields['mm_hashes'][modality][index]}".encode())
    sha.update(repr((adapter, fields.get("cache_salt"), gate, retrieval, owner)).encode())
    return sha.digest()


def cache_salt_of(prompt: EngineInput) -> str | None:
    """The salt that the user gave with a rendered prompt."""
    return cast(str | None, cast(Mapping[str, Any], prompt).get("cache_salt"))


def prompt_token_ids(prompt: EngineInput) -> Sequence[int]:
    """The token ids [T] of a rendered prompt."""
    return cast(Sequence[int], cast(Mapping[str, Any], prompt)["prompt_token_ids"])


def mm_items(prompt: EngineInput) -> list[tuple[str, int]]:
    """List (modality, index) of every multimodal item in the order in which vLLM sends them to the engine."""
    if prompt["type"] != "multimodal":
        return []
    return argsort_mm_positions(prompt["mm_placeholders"])


def key_pass_params(key_id: str, memory: MemoryIndex) -> SamplingParams:
    """Parameters of the first pass: prefill the prompt; the worker keeps what it finds under `key_id`.

    The key for the retrieval is a mean over *all* prompt tokens. So a pass that needs it fills the prefix cache but
    does not read it. A gate's evidence is read from the KV cache, whoever has filled it.
    """
    spec = KeyPassSpec(key_id, gate=memory.asked_gate, retrieval=memory.needs_retrieval_key)
    return SamplingParams(
        n=1,
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        watermarking=False,
        skip_reading_prefix_cache=spec.retrieval,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={EXTRA_ARGS_KEY: spec.to_extra_args()},
    )


def make_injection_spec(
    memory: MemoryIndex,
    lookup: MemoryLookup,
    remainder: bool,
    token_ids: Sequence[int],
    placeholders: Collection[int],
) -> InjectionSpec | None:
    """Create the spec of the second pass; None if the gate is closed.

    `token_ids` are the prompt's, `placeholders` those that stand for media; they decide from where memory acts.

    With `remainder`, entries that were not retrieved stay in the softmax with alpha = 0. It has no effect for the
    weighting "prior", in which alpha = 0 removes an entry.
    """
    if (retrieval := lookup.retrieval) is None:
        return None
    activation = memory.metadata.activation_of(lookup.gate_decision.task if lookup.gate_decision is not None else None)
    return InjectionSpec(
        bundle=memory.digest,
        entries=tuple(retrieval.entries.tolist()),
        weights=tuple(retrieval.weights.tolist()),  # float32 to float64 is exact
        remainder=remainder and memory.weighting == "sqrt",
        start=first_active_position(activation, token_ids, placeholders),
        expired=lookup.num_expired,
    )


def answer_pass_params(params: SamplingParams, spec: InjectionSpec | None) -> SamplingParams:
    """Parameters of the second pass: a copy of the user's, with the injection instead of our options."""
    answer_params = params.clone()
    extra = {name: value for name, value in (params.extra_args or {}).items() if not name.startswith(OPTION_PREFIX)}
    if spec is not None:
        extra[EXTRA_ARGS_KEY] = spec.to_extra_args()
    answer_params.extra_args = extra or None
    return answer_params


def answer_pass_prompt(prompt: EngineInput, spec: InjectionSpec | None) -> EngineInput:
    """The prompt of the second pass. An injection that changes every K and V gets its own prefix-cache salt.

    Without an injection it is the same prompt, which reuses the prefix cache that the first pass has filled. If memory
    acts from a later position on, the scheduler keeps the blocks from there on apart (`scheduler.py`).
    """
    if spec is None or spec.start > 0:
        return prompt
    salt = hashlib.sha256(repr((prompt.get("cache_salt"), spec.content)).encode())
    return cast(EngineInput, {**prompt, "cache_salt": salt.hexdigest()})


def decode_features(answers: list[dict[str, Any]]) -> QueryFeatures:
    """Decode what a key pass has found from the ranks' answers to `inducekv_pop_key`.

    Raises:
        RuntimeError: a rank has found nothing, or numbers that are not finite because the model overflowed.
    """
    for rank, answer in enumerate(answers):
        if "error" in answer:
            raise RuntimeError(f"rank {rank} has no query key: {answer['error']}")
    key, evidence = (_decode(answers[0][name]) for name in ("key", "evidence"))
    return QueryFeatures(key=key, evidence=evidence)


def _decode(sent: bytes | None) -> FloatArray | None:
    numbers = None if sent is None else np.frombuffer(sent, dtype=np.float32)
    if numbers is not None and not np.isfinite(numbers).all():
        raise RuntimeError("the model's hidden states for this prompt are not finite, so it has no query key")
    return numbers
