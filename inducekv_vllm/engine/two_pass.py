"""The two-pass engine client: vLLM's own `generate` with a memory in front of it.

    pass one    the prompt without memory, for what gate and index ask (skipped if it is cached, or nothing is asked)
    lookup      the memory's gate and index: entries and weights, or nothing
    pass two    the prompt again, with the entries injected: the answer

If the gate is closed, pass two is the plain request with the unchanged prompt, so it reuses the prefix-cache blocks
that pass one has filled. If the gate chooses a task that has a LoRA adapter instead of entries, pass two runs with that
adapter. If the memory was made with a LoRA adapter, both passes run with it, whether the gate is open or closed.

`TwoPassEngine.generate` replaces the engine client's `generate`, so every route of vLLM's server goes through it. A
request for a memory carries a `MemoryRequest`; every other request goes straight to the original.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
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
from ..gate import GateDecision
from ..host.config import InduceKVConfig
from ..host.logs import logger_of
from .gate_log import GateLog
from .key_cache import KeyCache, KeyLookup
from .memory_index import MemoryIndex, QueryFeatures
from .metrics import BundleMetrics
from .observation import observing
from .owner import OWNER
from .passes import (
    MemoryOptions,
    answer_pass_params,
    answer_pass_prompt,
    cache_salt_of,
    decode_features,
    key_pass_params,
    make_injection_spec,
    mm_items,
    prompt_identity,
    prompt_token_ids,
    read_options,
    refuse_options,
    require_rendered,
)
from .stopping import EngineStop
from .trace import TraceLog, describe_injection
from .wire import InjectionSpec

logger = logger_of(__name__)


class MemoryRequest(LoRARequest):
    """The handle of a bundle in vLLM's table of adapters. It is never sent to the engine."""


@dataclass(frozen=True)
class Lease:
    """One version of a memory, kept resident for one request."""

    memory: MemoryIndex
    adapter: LoRARequest | None  # for both passes
    task_adapters: Mapping[str, LoRARequest] = field(default_factory=dict)  # for the answer pass, by task
    metrics: BundleMetrics | None = None  # of its name; None for none

    def answer_adapter(self, decision: GateDecision | None) -> LoRARequest | None:
        """The adapter of the answer pass: that of the gate's task, if it has one of its own."""
        task = decision.task if decision is not None else None
        return self.adapter if task is None else self.task_adapters.get(task, self.adapter)


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


class TwoPassEngine:
    """See the module docstring. There is one per engine client; all state belongs to its event loop."""

    def __init__(
        self,
        client: EngineClient,
        memories: MemorySource,
        config: InduceKVConfig,
        stop: EngineStop | None = None,
        record_answer: Callable[[str, str, dict[str, Any]], Awaitable[None]] | None = None,
    ) -> None:
        """`record_answer` is called before each answer with its request id, its owner and what it is answered with.

        Raises ConfigError: the gate log cannot be used.
        """
        self._client = client
        self._stop = stop or EngineStop(client)
        self._plain_generate = client.generate  # the original, before the server replaces `client.generate`
        self._memories = memories
        self._config = config
        self._record_answer = record_answer
        self._placeholders = placeholder_ids(client.model_config.hf_config)
        self._keys = KeyCache(config.key_cache_entries)
        self._gate_log = GateLog.of(config)
        self._background: set[asyncio.Task[None]] = set()
        self._tracing = client.vllm_config.observability_config.otlp_traces_endpoint is not None
        self.traces = TraceLog()

    def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """`AsyncLLM.generate`, with two passes for a `MemoryRequest`. `options` are vLLM's, for the answer pass.

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
            memory_options = read_options(sampling_params, lease.memory.num_entries)
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
            options = {**options, "trace_headers": observed.trace_headers}
            with self._invalidating_mm_cache(prompt):
                key_lookup = await self._query_features(prompt, held, request_id, options)
            observed.keyed(key_lookup.source)
            lookup = memory.lookup(key_lookup.features, memory_options.top_k or self._config.top_k)
            self._gate_log.note(memory, key_lookup.features, lookup)
            spec = make_injection_spec(
                memory, lookup, self._config.remainder, prompt_token_ids(prompt), self._placeholders
            )
            observed.looked_up(lookup)
            with self._invalidating_mm_cache(prompt):
                await self._record(request_id, held.owner, metrics.bundle, memory, spec, lookup.gate_decision)

            if key_lookup.source == "computed":
                self._sync_mm_lru(prompt)
            answer = self._plain_generate(
                answer_pass_prompt(prompt, spec),
                answer_pass_params(params, spec),
                request_id,
                lora_request=lease.answer_adapter(lookup.gate_decision),
                **options,
            )
            async with contextlib.aclosing(answer) as outputs:
                async for output in outputs:
                    if output.finished:
                        observed.finished(output)
                    if output.finished and memory_options.trace:
                        trace = describe_injection(metrics.bundle, memory, spec, lookup.gate_decision)
                        trace["timings"] = observed.timings
                        self.traces.put(held.owner, cache_salt_of(prompt), request_id, trace)
                        output.kv_transfer_params = {**(output.kv_transfer_params or {}), "inducekv": trace}
                    yield output

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

    async def _query_features(
        self, prompt: EngineInput, held: HeldLease, request_id: str, options: Mapping[str, Any]
    ) -> KeyLookup:
        """What the memory needs of a prompt. Who shares a computation gets it with the options of the first."""
        lease, memory = held.lease, held.lease.memory
        if not memory.needs_key_pass:
            return KeyLookup(QueryFeatures(), "none")

        def compute() -> Awaitable[QueryFeatures]:
            return self._key_pass(prompt, lease, request_id, options)

        adapter = lease.adapter.lora_name if lease.adapter else None
        identity = prompt_identity(prompt, adapter, memory.asked_gate, memory.needs_retrieval_key, held.owner)
        return await self._keys.get(identity, compute, memory.digest)

    async def _record(
        self,
        request_id: str,
        owner: str,
        name: str,
        memory: MemoryIndex,
        spec: InjectionSpec | None,
        decision: GateDecision | None,
    ) -> None:
        if self._record_answer is None:
            return
        try:
            await self._record_answer(request_id, owner, describe_injection(name, memory, spec, decision))
        except InduceKVError as error:  # without a record there is no answer
            raise RetryableRequestError(str(error)) from error

    def forget(self, digest: str) -> None:
        """Drop what is left of answers with this version of a memory: traces, and query keys that it used last."""
        self.traces.drop(digest)
        self._keys.drop(digest)

    async def _key_pass(
        self, prompt: EngineInput, lease: Lease, request_id: str, options: Mapping[str, Any]
    ) -> QueryFeatures:
        """Pass one. An error or a cancellation leaves neither a request nor a key behind."""
        key_id = f"{request_id}-key-{uuid.uuid4().hex}"
        params = key_pass_params(key_id, lease.memory)
        try:
            outputs = self._plain_generate(
                prompt,
                params,
                key_id,
                lora_request=lease.adapter,
                priority=options.get("priority", 0),
                trace_headers=options.get("trace_headers"),
            )
            reason = [output async for output in outputs][-1].outputs[0].finish_reason
            if reason == "abort":
                raise RetryableRequestError("the engine aborted the request during its key pass; please retry")
            if reason == "error":
                raise GenerationError("the key pass failed inside the engine")
            try:
                return decode_features(await self._client.collective_rpc("inducekv_pop_key", args=(key_id,)))
            except RuntimeError as error:
                raise GenerationError(str(error)) from error
        except BaseException:
            self._drop_key_later(key_id)
            raise

    def _drop_key_later(self, key_id: str) -> None:
        """Drop a key in the background, because the caller is being cancelled or is raising an error."""

        async def drop() -> None:
            try:
                await self._client.collective_rpc("inducekv_drop_key", args=(key_id,))
            except Exception as error:  # the engine is gone, and the key with it
                logger.warning("could not drop query key %s: %r", key_id, error)

        task = asyncio.get_running_loop().create_task(drop())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

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

    def _sync_mm_lru(self, prompt: EngineInput) -> None:
        """Keep vLLM's cache of processed images in step with its mirror in the engine process.

        Both are LRU caches and must evict in the same order, because an image that this side believes cached is sent
        without its data. The engine sees this prompt's images a second time, so this side must touch them again too,
        in the same order.
        """
        cache = self._client.renderer.mm_processor_cache
        if cache is None or prompt["type"] != "multimodal":
            return
        for modality, index in mm_items(prompt):
            # The renderer's thread may evict the item between the cache's lookup and its move; then skip it.
            with contextlib.suppress(KeyError):
                cache.touch_sender_cache_item(prompt["mm_hashes"][modality][index])
