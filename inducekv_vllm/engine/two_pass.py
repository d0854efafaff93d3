"""The two-pass engine client: vLLM's own `generate`, with a memory in front of it.

    pass one    the prompt without memory, for its query key          (skipped when the key is known)
    recall      the key against the memory's gate and index: entries and weights, or nothing
    pass two    the prompt again, with the entries injected: the answer

Where the gate is closed, pass two is the plain request, as it would have come without memory: the same prompt under no
salt of ours, so that it reuses the prefix-cache blocks which pass one has filled. (A memory made with a LoRA adapter is
a memory of the model with that adapter, so both passes run with it, the plain one too.)

`TwoPassEngine.generate` takes the place of the engine client's `generate`, so that every route of vLLM's server goes
through it. A request for a memory carries a `MemoryRequest`; any other goes straight to the original, untouched.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

from vllm.engine.protocol import EngineClient
from vllm.exceptions import GenerationError, RetryableRequestError, VLLMNotFoundError, VLLMValidationError
from vllm.inputs import EngineInput
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from ..config import InduceKVConfig
from ..errors import InduceKVError, UnknownBundle
from ..metrics import count_request
from ..retrieval import FloatArray
from .key_cache import KeyCache, KeyLookup
from .memory_index import Memory
from .passes import (
    MemoryOptions,
    answer_pass_params,
    answer_pass_prompt,
    decode_key,
    key_pass_params,
    mm_items,
    order_memory,
    prompt_identity,
    read_options,
    refuse_options,
    require_rendered,
)
from .trace import TraceLog, describe_order

logger = init_logger(__name__)


class MemoryRequest(LoRARequest):
    """The handle of a bundle in vLLM's table of adapters: listed and chosen like one, never sent to the engine."""


@dataclass(frozen=True)
class Lease:
    """One version of a memory, kept resident for the length of one request."""

    memory: Memory
    adapter: LoRARequest | None  # what both passes run with


class MemorySource(Protocol):
    """Where the engine finds memories by name."""

    def lease(self, name: str) -> AbstractContextManager[Lease]:
        """Raises UnknownBundle, or another InduceKVError where the memory cannot be used now."""
        ...


class TwoPassEngine:
    """See the module's head. One per engine client; all state belongs to its event loop."""

    def __init__(self, client: EngineClient, memories: MemorySource, config: InduceKVConfig) -> None:
        self._client = client
        self._plain_generate = client.generate  # the original: `client.generate` itself is about to be replaced
        self._memories = memories
        self._config = config
        self._keys = KeyCache(config.key_cache_entries)
        self._background: set[asyncio.Task[None]] = set()
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
        """`AsyncLLM.generate`, and for a `MemoryRequest` the two passes. `options` are vLLM's and go to the answer.

        Raises:
            VLLMValidationError: at the call, so that a stream has not begun: arguments that do not fit a memory.
            VLLMNotFoundError: likewise: the bundle has been unloaded since the request was accepted.
        """
        if not isinstance(lora_request, MemoryRequest):
            with self._forgetting_pictures(prompt):
                refuse_options(sampling_params)
            return self._plain_generate(prompt, sampling_params, request_id, lora_request=lora_request, **options)
        with self._forgetting_pictures(prompt):
            rendered = require_rendered(prompt)
            with self._lease(lora_request.lora_name) as lease:
                memory_options = read_options(sampling_params, lease.memory.num_entries)
        return self._generate_with_memory(
            lora_request.lora_name, rendered, sampling_params, memory_options, request_id, options
        )

    async def _generate_with_memory(
        self,
        name: str,
        prompt: EngineInput,
        params: SamplingParams,
        memory_options: MemoryOptions,
        request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        with self._lease(name) as lease:
            memory = lease.memory
            started = time.perf_counter()
            with self._forgetting_pictures(prompt):
                lookup = await self._query_key(prompt, lease.adapter, request_id, options.get("priority", 0))
            keyed = time.perf_counter()
            top_k = memory_options.top_k or self._config.top_k
            recall = memory.recall(lookup.key, top_k)
            order = order_memory(memory, recall, self._config.remainder)
            retrieved = time.perf_counter()
            count_request(name, recall.relevance)

            if lookup.source == "computed":
                self._mirror_second_use(prompt)
            answer = self._plain_generate(
                answer_pass_prompt(prompt, order),
                answer_pass_params(params, order),
                request_id,
                lora_request=lease.adapter,
                **options,
            )
            async with contextlib.aclosing(answer) as outputs:
                async for output in outputs:
                    if output.finished and memory_options.trace:
                        trace = describe_order(name, memory, order, recall.relevance)
                        trace["timings"] = {
                            "key_pass_ms": 1e3 * (keyed - started),
                            "key_source": lookup.source,
                            "retrieval_ms": 1e3 * (retrieved - keyed),
                            "answer_pass_ms": 1e3 * (time.perf_counter() - retrieved),
                        }
                        self.traces.put(request_id, trace)
                        output.kv_transfer_params = {**(output.kv_transfer_params or {}), "inducekv": trace}
                    yield output

    @contextlib.contextmanager
    def _lease(self, name: str) -> Iterator[Lease]:
        """The source's lease, with its errors as vLLM's, so that HTTP answers with the right status."""
        with contextlib.ExitStack() as stack:
            try:
                lease = stack.enter_context(self._memories.lease(name))
            except UnknownBundle as error:
                raise VLLMNotFoundError(str(error)) from error
            except InduceKVError as error:
                raise VLLMValidationError(str(error)) from error
            yield lease

    async def _query_key(
        self, prompt: EngineInput, adapter: LoRARequest | None, request_id: str, priority: int
    ) -> KeyLookup:
        """The key [2, d] of a prompt. Requests that share one computation share the priority of the first."""

        def compute() -> Awaitable[FloatArray]:
            return self._key_pass(prompt, adapter, request_id, priority)

        identity = prompt_identity(prompt, adapter.lora_name if adapter else None)
        return await self._keys.get(identity, compute)

    async def _key_pass(
        self, prompt: EngineInput, adapter: LoRARequest | None, request_id: str, priority: int
    ) -> FloatArray:
        """Pass one. Whatever ends it early, also a cancellation, leaves neither a request nor a key behind."""
        key_id = f"{request_id}-key-{uuid.uuid4().hex}"
        try:
            outputs = self._plain_generate(
                prompt, key_pass_params(key_id), key_id, lora_request=adapter, priority=priority
            )
            reason = [output async for output in outputs][-1].outputs[0].finish_reason
            if reason == "abort":
                raise RetryableRequestError("the engine aborted the request during its key pass; please retry")
            if reason == "error":
                raise GenerationError("the key pass failed inside the engine")
            try:
                return decode_key(await self._client.collective_rpc("inducekv_pop_key", args=(key_id,)))
            except RuntimeError as error:
                raise GenerationError(str(error)) from error
        except BaseException:
            self._drop_key_later(key_id)
            raise

    def _drop_key_later(self, key_id: str) -> None:
        """Not awaited in place: the caller is being cancelled, or has an error to report."""

        async def drop() -> None:
            try:
                await self._client.collective_rpc("inducekv_drop_key", args=(key_id,))
            except Exception as error:  # the engine is gone, and the key with it
                logger.warning("could not drop query key %s: %r", key_id, error)

        task = asyncio.get_running_loop().create_task(drop())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def forget_pictures(self, prompt: Any) -> None:
        """For a rendered prompt that the engine never gets.

        Rendering has noted its new pictures as cached in the engine; another prompt with one of them would be sent
        without the data, and fail. To forget a picture that did arrive costs one more transfer.
        """
        cache = self._client.renderer.mm_processor_cache
        if cache is None or not isinstance(prompt, dict) or prompt.get("type") != "multimodal":
            return
        for modality, index in mm_items(cast(EngineInput, prompt)):
            if prompt["mm_kwargs"][modality][index] is not None:
                cache.invalidate(prompt["mm_hashes"][modality][index])

    @contextlib.contextmanager
    def _forgetting_pictures(self, prompt: Any) -> Iterator[None]:
        """Forgets the prompt's pictures when the block ends by an error or a cancellation."""
        try:
            yield
        except BaseException:
            self.forget_pictures(prompt)
            raise

    def _mirror_second_use(self, prompt: EngineInput) -> None:
        """Keep vLLM's cache of processed pictures in step with its mirror in the engine process.

        Both evict by least use and must agree on the order, because a picture that this side believes cached is sent
        without its data. The engine sees this prompt's pictures a second time, so this side must use them a second
        time as well, in the same order.
        """
        cache = self._client.renderer.mm_processor_cache
        if cache is None or prompt["type"] != "multimodal":
            return
        for modality, index in mm_items(prompt):
            # The renderer's thread may evict the item between the cache's look-up and its move: then it is not used.
            with contextlib.suppress(KeyError):
                cache.touch_sender_cache_item(prompt["mm_hashes"][modality][index])
