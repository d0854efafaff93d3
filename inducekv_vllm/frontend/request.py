"""A request for a memory, as the engine is asked: what it may ask, and what the workers shall do for it.

Shapes: T prompt tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.multimodal.utils import argsort_mm_positions
from vllm.sampling_params import SamplingParams

from ..bundle.activation import first_active_position
from ..facts import STRICTNESS, StrictnessName, named_strictness
from ..protocol import EXTRA_ARGS_KEY, DecideSpec, InjectionSpec, TaskAdapter
from ..vllm_seams.config import InduceKVConfig
from .served_bundle import ServedBundle

OPTION_PREFIX = "inducekv_"
TRACE_OPTION = "inducekv_trace"
TOP_K_OPTION = "inducekv_top_k"
STRICTNESS_OPTION: Final = "inducekv_strictness"


@dataclass(frozen=True)
class EngineRequest:
    """A request to one version of a memory."""

    memory: ServedBundle
    user_params: SamplingParams
    spec: DecideSpec | InjectionSpec | None
    params: SamplingParams  # with the spec
    is_traced: bool


def engine_request(
    memory: ServedBundle,
    prompt: EngineInput,
    params: SamplingParams,
    config: InduceKVConfig,
    placeholders: Collection[int],
    owner: str,
    task_adapters: Mapping[str, LoRARequest],
) -> EngineRequest:
    """Check a request, and make its spec. Arguments as for `spec_for`; raises what `read_options` raises."""
    options = read_options(params, memory)
    top_k = options.top_k or config.top_k
    spec = spec_for(memory, prompt, top_k, config.remainder, placeholders, owner, task_adapters, options.strictness)
    return EngineRequest(memory, params, spec, with_spec(params, spec), options.trace)


@dataclass(frozen=True)
class MemoryOptions:
    """A request's options for its memory, from the extra body field `vllm_xargs`."""

    trace: bool = False
    top_k: int | None = None  # None for the server's setting
    strictness: StrictnessName | None = None  # None for the memory's


def read_options(params: SamplingParams, memory: ServedBundle) -> MemoryOptions:
    """Read and check the options of a request to a memory.

    Raises:
        VLLMValidationError: an option is unknown or out of range, the worker's reserved key is used, or the request
            asks for log-probabilities of a prompt that is computed with memory only after its decision.
    """
    num_entries = memory.num_entries
    options = _own_arguments(params)
    supported = {TRACE_OPTION, TOP_K_OPTION, STRICTNESS_OPTION}
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
    strictness = options.get(STRICTNESS_OPTION)
    if strictness is not None:
        require_strictness(strictness)
    if params.prompt_logprobs is not None and memory.needs_decision and memory.acts_on_prompt:
        raise VLLMValidationError(
            "log-probabilities of the prompt cannot be had from a memory that acts on the prompt once it is decided",
            parameter="prompt_logprobs",
        )
    return MemoryOptions(bool(trace), top_k, strictness)


def require_strictness(found: object) -> None:
    """Raise VLLMValidationError if it is no name of a strictness."""
    if found not in tuple(STRICTNESS):  # it may be of any type
        raise VLLMValidationError(
            f"{STRICTNESS_OPTION} must be {named_strictness()}, found {found!r:.100}", parameter="vllm_xargs"
        )


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


def spec_for(
    memory: ServedBundle,
    prompt: EngineInput,
    top_k: int | None,
    remainder: bool,
    placeholders: Collection[int],
    owner: str = "",
    task_adapters: Mapping[str, LoRARequest] | None = None,
    strictness: StrictnessName | None = None,
) -> DecideSpec | InjectionSpec | None:
    """What the workers shall do for a prompt; None if there is nothing to inject: every entry has expired.

    Args:
        prompt: rendered.
        top_k: entries retrieved; None for all.
        remainder: weighting "sqrt" with `top_k`: entries not retrieved stay in the softmax with alpha = 0.
        placeholders: the ids of tokens that stand for media.
        owner: who may share a decision.
        task_adapters: adapters by task, of tasks that have one instead of entries.
        strictness: how much the prompt may differ from a fact's question; None for the memory's.
    """
    if memory.needs_decision:
        adapters = tuple((task, TaskAdapter.of(each)) for task, each in sorted((task_adapters or {}).items()))
        retrieval = memory.weighting != "uniform" and memory.num_entries > 0
        asked = strictness or memory.metadata.strictness
        return DecideSpec(memory.digest, retrieval, top_k, remainder, owner, adapters, asked)
    alive = memory.alive()
    if not alive:
        return None
    token_ids = cast(Sequence[int], cast(Mapping[str, Any], prompt)["prompt_token_ids"])  # [T]
    first_active = first_active_position(memory.metadata.activation_of(None), token_ids, placeholders)
    expired = memory.num_entries - len(alive)
    return InjectionSpec(memory.digest, tuple(alive), (1.0,) * len(alive), False, first_active, expired)


def with_spec(params: SamplingParams, spec: DecideSpec | InjectionSpec | None) -> SamplingParams:
    """A copy of the user's parameters, with the spec instead of our options."""
    own = params.clone()
    extra = {name: value for name, value in (params.extra_args or {}).items() if not name.startswith(OPTION_PREFIX)}
    if spec is not None:
        extra[EXTRA_ARGS_KEY] = spec.to_extra_args()
    own.extra_args = extra or None
    return own


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


def cache_salt_of(prompt: EngineInput) -> str | None:
    """The salt that the user gave with a rendered prompt."""
    return cast(str | None, cast(Mapping[str, Any], prompt).get("cache_salt"))


def mm_items(prompt: EngineInput) -> list[tuple[str, int]]:
    """List (modality, index) of every multimodal item in the order in which vLLM sends them to the engine."""
    if prompt["type"] != "multimodal":
        return []
    return argsort_mm_positions(prompt["mm_placeholders"])
