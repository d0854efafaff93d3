"""A request for memory, as the engine is asked: its memories, what it may ask, and what the workers shall do for it.

Shapes: T prompt tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.multimodal.utils import argsort_mm_positions
from vllm.sampling_params import SamplingParams

from ..bundle.activation import first_active_position
from ..facts import AskedFacts
from ..protocol import EXTRA_ARGS_KEY, DecideSpec, InjectionSpec, TaskAdapter, extra_args_of
from ..vllm_seams.config import InduceKVConfig
from .served_bundle import ServedBundle

OPTION_PREFIX = "inducekv_"
TRACE_OPTION = "inducekv_trace"
TOP_K_OPTION = "inducekv_top_k"
MEMORIES_OPTION: Final = "inducekv_memories"
Spec = DecideSpec | InjectionSpec | None  # None: nothing to inject, because every entry has expired


@dataclass(frozen=True)
class AdaptedMemory:
    """One version of a memory, with the LoRA adapters of its tasks."""

    memory: ServedBundle
    task_adapters: Mapping[str, LoRARequest] = field(default_factory=dict)  # instead of entries, by task


@dataclass(frozen=True)
class EngineRequest:
    """A request to one version of each of its memories."""

    memories: tuple[ServedBundle, ...]
    user_params: SamplingParams
    specs: tuple[Spec, ...]  # one for each
    params: SamplingParams  # with the specs
    is_traced: bool

    def asking(self, asked: Sequence[AskedFacts]) -> EngineRequest:
        """With the facts that its text asks for, of each of its memories."""
        specs = with_asked(self.specs, asked)
        return replace(self, specs=specs, params=with_specs(self.user_params, specs))


def memory_names(model: str, arguments: Mapping[str, Any] | None, config: InduceKVConfig) -> tuple[str, ...]:
    """The names of a request's memories: its own, and the one that it shares with others, if any.

    Args:
        model: the name that the request asks for.
        arguments: its `vllm_xargs`.

    Raises:
        VLLMValidationError: the argument for them is no list of as many names as the server allows, its own first.
    """
    listed = (arguments or {}).get(MEMORIES_OPTION)
    if listed is None:
        return (model,) if config.shared in (None, model) else (model, config.shared)
    names = tuple(listed) if isinstance(listed, list) else ()
    if names[:1] != (model,) or not all(isinstance(name, str) for name in names):
        raise VLLMValidationError(
            f"{MEMORIES_OPTION} must be a list of names that begins with the request's model, {model!r:.200}; found "
            f"{listed!r:.200}",
            parameter="vllm_xargs",
        )
    if len(names) > config.most_memories:
        raise VLLMValidationError(
            f"{MEMORIES_OPTION} has {len(names)} names, and a request to this server may have {config.most_memories}; "
            "for two, start it with --memory-shared",
            parameter="vllm_xargs",
        )
    # Whoever lets clients have some names alone, by their model, has not allowed others here.
    if config.max_memories is None and any(name.partition("@")[0] != config.shared for name in names[1:]):
        raise VLLMValidationError(
            f"the second name of {MEMORIES_OPTION} can be {config.shared!r} alone, which this server shares, found "
            f"{names[1]!r:.200}; its setting max_memories of 2 would allow any",
            parameter="vllm_xargs",
        )
    return names


def require_together(memories: Sequence[ServedBundle]) -> None:
    """Raise VLLMValidationError if these memories cannot answer one request."""
    acting = [memory for memory in memories if memory.num_entries or memory.metadata.task_adapters]
    reasons = [memory.acts_alone for memory in acting if memory.acts_alone is not None]
    if len(acting) > 1 and reasons:
        raise VLLMValidationError(
            f"a memory bundle that {reasons[0]} cannot act beside another one: name one alone in vllm_xargs, by "
            f"{MEMORIES_OPTION}",
            parameter="model",
        )


def engine_request(
    asked: Sequence[AdaptedMemory],
    prompt: EngineInput,
    params: SamplingParams,
    config: InduceKVConfig,
    placeholders: Collection[int],
) -> EngineRequest:
    """Check a request, and make its specs.

    Arguments as for `specs_for`; raises what `require_together` and `read_options` raise.
    """
    memories = tuple(each.memory for each in asked)
    options = read_options(params, memories)
    specs = specs_for(asked, prompt, config, placeholders, options)
    return EngineRequest(memories, params, specs, with_specs(params, specs), options.trace)


@dataclass(frozen=True)
class MemoryOptions:
    """A request's options for its memories, from the extra body field `vllm_xargs`."""

    trace: bool = False
    top_k: int | None = None  # of its own memory; None for the server's setting


def read_options(params: SamplingParams, memories: Sequence[ServedBundle]) -> MemoryOptions:
    """Read and check the options of a request to its memories, its own first.

    Raises:
        VLLMValidationError: an option is unknown or out of range, the worker's reserved key is used, the memories do
            not go together, or the request asks for log-probabilities of a prompt that is computed with memory only
            after its decision.
    """
    require_together(memories)
    options = _own_arguments(params)
    supported = {TRACE_OPTION, TOP_K_OPTION, MEMORIES_OPTION}
    if unknown := sorted(options.keys() - supported):
        raise VLLMValidationError(
            f"unknown argument {unknown[0]!r} in vllm_xargs; a memory takes {', '.join(sorted(supported))}",
            parameter="vllm_xargs",
        )
    trace, top_k = options.get(TRACE_OPTION, 0), options.get(TOP_K_OPTION)
    if not isinstance(trace, int) or trace not in (0, 1):
        raise VLLMValidationError(f"{TRACE_OPTION} must be 0 or 1, found {trace!r}", parameter="vllm_xargs")
    if top_k is not None:
        require_top_k(top_k, memories[0])
    acts_on_prompt = any(memory.acts_on_prompt for memory in memories)
    if params.prompt_logprobs is not None and any(memory.needs_decision for memory in memories) and acts_on_prompt:
        raise VLLMValidationError(
            "log-probabilities of the prompt cannot be had from a memory that acts on the prompt once it is decided",
            parameter="prompt_logprobs",
        )
    return MemoryOptions(bool(trace), top_k)


def require_top_k(found: object, memory: ServedBundle) -> None:
    """Raise VLLMValidationError if it is no number of entries that could be retrieved for one request."""
    if not memory.retrieves:
        raise VLLMValidationError(
            f"{TOP_K_OPTION} has nothing to choose from: the memory "
            + ("has no entries" if not memory.num_entries else "gives a request all entries of its task"),
            parameter="vllm_xargs",
        )
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= memory.num_entries:
        raise VLLMValidationError(
            f"{TOP_K_OPTION} must be a whole number from 1 to {memory.num_entries}, the memory's entries; "
            f"found {found!r:.100}",
            parameter="vllm_xargs",
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


def specs_for(
    asked: Sequence[AdaptedMemory],
    prompt: EngineInput,
    config: InduceKVConfig,
    placeholders: Collection[int],
    options: MemoryOptions | None = None,
) -> tuple[Spec, ...]:
    """What the workers shall do for a prompt, for each of its memories. If one is to be decided, all are.

    Args:
        asked: the request's own memory first.
        prompt: rendered.
        config: how many entries are retrieved.
        placeholders: the ids of tokens that stand for media.
        options: the request's.
    """
    options = options or MemoryOptions()
    if not any(each.memory.needs_decision for each in asked):
        return tuple(_injection(each.memory, prompt, placeholders) for each in asked)
    top_ks = [options.top_k or config.top_k, *(config.top_k for _ in asked[1:])]
    return tuple(_to_decide(each, top_k) for each, top_k in zip(asked, top_ks, strict=True))


def _to_decide(asked: AdaptedMemory, top_k: int | None) -> DecideSpec:
    memory = asked.memory
    adapters = tuple((task, TaskAdapter.of(each)) for task, each in sorted(asked.task_adapters.items()))
    return DecideSpec(memory.digest, memory.retrieves, top_k, adapters)


def _injection(memory: ServedBundle, prompt: EngineInput, placeholders: Collection[int]) -> InjectionSpec | None:
    alive = memory.alive()
    if not alive:
        return None
    token_ids = cast(Sequence[int], cast(Mapping[str, Any], prompt)["prompt_token_ids"])  # [T]
    first_active = first_active_position(memory.metadata.activation_of(None), token_ids, placeholders)
    expired = memory.num_entries - len(alive)
    return InjectionSpec(memory.digest, tuple(alive), (1.0,) * len(alive), first_active, expired)


def with_asked(specs: Sequence[Spec], asked: Sequence[AskedFacts]) -> tuple[Spec, ...]:
    """With the facts that the text asks for, of each of the request's memories."""
    pairs = zip(specs, asked, strict=True)
    return tuple(replace(spec, asked=facts) if isinstance(spec, DecideSpec) else spec for spec, facts in pairs)


def with_specs(params: SamplingParams, specs: Sequence[Spec]) -> SamplingParams:
    """A copy of the user's parameters, with the specs instead of our options."""
    own = params.clone()
    extra = {name: value for name, value in (params.extra_args or {}).items() if not name.startswith(OPTION_PREFIX)}
    extra |= extra_args_of(tuple(spec for spec in specs if spec is not None))  # type: ignore[arg-type]
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
