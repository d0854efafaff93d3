"""The engine client with memory: vLLM's own `generate`, with what the workers need to decide on a request.

`MemoryEngine.generate` replaces the engine client's `generate`, so every route of vLLM's server goes through it. A
request for a memory carries a `MemoryRequest`; every other request goes straight to the original. The request's first
output brings the decision (`scheduler.py`): metrics, spans, traces and the audit log read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from vllm.engine.protocol import EngineClient
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMNotFoundError, VLLMValidationError
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from ..backbone.placeholders import placeholder_ids
from ..errors import InduceKVError, UnknownBundle
from ..host.config import InduceKVConfig
from .memory import Memory, undisputed
from .metrics import BundleMetrics
from .observation import Observation, observing
from .options import (
    MemoryOptions,
    cache_salt_of,
    mm_items,
    prompt_token_ids,
    read_options,
    refuse_options,
    require_rendered,
    with_spec,
)
from .owner import OWNER
from .stopping import EngineStop
from .trace import describe
from .wire import Decision

RecordAnswer = Callable[[str, str, dict[str, Any]], Awaitable[None]]
PutTrace = Callable[[str, str | None, str, dict[str, Any]], Awaitable[None]]


class MemoryRequest(LoRARequest):
    """The handle of a bundle in vLLM's table of adapters. It is never sent to the engine."""


@dataclass(frozen=True)
class Lease:
    """One version of a memory, kept resident for one request."""

    memory: Memory
    adapter: LoRARequest | None  # of the memory
    task_adapters: Mapping[str, LoRARequest] = field(default_factory=dict)  # instead of entries, by task
    metrics: BundleMetrics | None = None  # of its name; None for none


class MemorySource(Protocol):
    """Provides memories by name."""

    def lease(self, name: str) -> AbstractContextManager[Lease]:
        """Raises UnknownBundle, or another InduceKVError if the memory cannot be used now."""
        ...


@dataclass(frozen=True, eq=False)
class HeldLease:
    """A lease on its way from `generate` to the generator it returns.

    Only the generator's frame refers to this object. If the generator is dropped or closed before its first iteration,
    its `finally` blocks never run; the lease then ends with this object. Create it on the event loop.
    """

    lease: Lease
    owner: str  # whose request it is
    stack: contextlib.ExitStack  # ends the lease

    def __post_init__(self) -> None:
        weakref.finalize(self, _close_on_loop, asyncio.get_running_loop(), self.stack).atexit = False


def _close_on_loop(loop: asyncio.AbstractEventLoop, stack: contextlib.ExitStack) -> None:
    """Garbage collection may run in any thread, but leases belong to the event loop."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(stack.close)


class MemoryEngine:
    """See the module docstring. There is one per engine client; all state belongs to its event loop."""

    def __init__(
        self,
        client: EngineClient,
        memories: MemorySource,
        config: InduceKVConfig,
        stop: EngineStop | None = None,
        record_answer: RecordAnswer | None = None,
        put_trace: PutTrace | None = None,
    ) -> None:
        """
        Args:
            record_answer: called before each answer with its request id, its owner and what it is answered with.
            put_trace: called at the end of each answer that is traced, with its owner, cache salt and request id.
        """
        self._client = client
        self._stop = stop or EngineStop(client)
        self._plain_generate = client.generate  # the original, before the server replaces `client.generate`
        self._memories = memories
        self._config = config
        self._record_answer = record_answer
        self._placeholders = placeholder_ids(client.model_config.hf_config)
        self._tracing = client.vllm_config.observability_config.otlp_traces_endpoint is not None
        self._put_trace = put_trace

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`AsyncLLM.generate`, with memory for a `MemoryRequest`.

        A request leases its memory at the call and keeps that version until the stream ends. Errors are raised at the
        call, before the stream begins.

        Raises:
            VLLMValidationError: the arguments do not fit the memory.
            VLLMNotFoundError: the bundle has been unloaded since the server accepted the request.
            RetryableRequestError: the server is shutting down.
        """
        if not isinstance(lora_request, MemoryRequest):
            with self._invalidating_mm_cache(prompt):
                self._stop.refuse_new()
                refuse_options(sampling_params)
            return self._plain_generate(prompt, sampling_params, request_id, lora_request=lora_request, **options)
        name = lora_request.lora_name
        with self._invalidating_mm_cache(prompt), contextlib.ExitStack() as stack:
            stack.enter_context(self._stop.running())
            rendered = require_rendered(prompt)
            lease = stack.enter_context(self._lease(name))
            memory_options = read_options(sampling_params, lease.memory)
            held = HeldLease(lease, OWNER.get(), stack.pop_all())
        return self._generate_with_memory(name, held, rendered, sampling_params, memory_options, request_id, options)

    async def _generate_with_memory(
        self,
        name: str,
        held: HeldLease,
        prompt: EngineInput,
        params: SamplingParams,
        memory_options: MemoryOptions,
        request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        lease, memory = held.lease, held.lease.memory
        metrics = lease.metrics or BundleMetrics(name, exported=False)
        with held.stack, observing(metrics, memory, options.get("trace_headers"), self._tracing) as observed:
            spec = memory.spec(
                memory_options.top_k or self._config.top_k,
                self._config.remainder,
                prompt_token_ids(prompt),
                self._placeholders,
                held.owner,
                lease.task_adapters,
            )
            options = {**options, "trace_headers": observed.trace_headers}
            outputs = self._plain_generate(
                prompt, with_spec(params, spec), request_id, lora_request=lease.adapter, **options
            )
            decision = undisputed(spec)
            is_noted = False
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    decision = taken_from(output) or decision
                    if decision is not None and decision.error is not None:
                        raise GenerationError(decision.error)
                    if not is_noted and decision is not None:
                        is_noted = True
                        await self._note(request_id, held.owner, metrics.bundle, memory, decision, observed)
                    if output.finished:
                        observed.finished(output)
                    if output.finished and memory_options.trace and decision is not None:
                        trace = {**describe(metrics.bundle, memory, decision), "timings": observed.timings}
                        if self._put_trace is not None:
                            await self._put_trace(held.owner, cache_salt_of(prompt), request_id, trace)
                        output.kv_transfer_params = {**(output.kv_transfer_params or {}), "inducekv": trace}
                    yield output

    async def _note(
        self, request_id: str, owner: str, name: str, memory: Memory, decision: Decision, observed: Observation
    ) -> None:
        """Before the answer begins."""
        observed.decided(decision)
        if self._record_answer is None:
            return
        try:
            await self._record_answer(request_id, owner, describe(name, memory, decision))
        except InduceKVError as error:  # without a record there is no answer
            raise RetryableRequestError(str(error)) from error

    @contextlib.contextmanager
    def _lease(self, name: str) -> Iterator[Lease]:
        """The source's lease, with its errors converted to vLLM's, which HTTP answers with the right status."""
        with contextlib.ExitStack() as stack:
            try:
                lease = stack.enter_context(self._memories.lease(name))
            except UnknownBundle as error:
                raise VLLMNotFoundError(str(error)) from error
            except InduceKVError as error:
                raise VLLMValidationError(str(error)) from error
            yield lease

    def invalidate_mm_cache(self, prompt: Any) -> None:
        """Call this for a rendered prompt that the engine never receives.

        Rendering marks its new images as cached in the engine. Another prompt with one of them would be sent without
        the data, and fail. Invalidating an image that did arrive only costs one more transfer.
        """
        cache = self._client.renderer.mm_processor_cache
        if cache is None or not isinstance(prompt, dict) or prompt.get("type") != "multimodal":
            return
        for modality, index in mm_items(cast(EngineInput, prompt)):
            if prompt["mm_kwargs"][modality][index] is not None:
                cache.invalidate(prompt["mm_hashes"][modality][index])

    @contextlib.contextmanager
    def _invalidating_mm_cache(self, prompt: Any) -> Iterator[None]:
        """Call `invalidate_mm_cache` if the block ends by an error or a cancellation."""
        try:
            yield
        except BaseException:
            self.invalidate_mm_cache(prompt)
            raise


def taken_from(output: RequestOutput) -> Decision | None:
    """The decision that an output brings, if it brings one. It is taken out of vLLM's field."""
    told = dict(output.kv_transfer_params or {})
    raw = told.pop("inducekv", None)
    output.kv_transfer_params = told or None
    return None if raw is None else Decision.parse(raw)
