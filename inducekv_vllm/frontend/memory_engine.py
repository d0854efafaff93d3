"""The engine client with memory: vLLM's own `generate`, with what the workers need to decide on a request.

`MemoryEngine.generate` replaces the engine client's `generate`, so every route of vLLM's server goes through it. A
request for a memory carries a `MemoryRequest`; every other request goes straight to the original. `memory_names` says
which memories it has (`request.py`). Its outputs bring what was decided (`scheduler.py`), the first that is read too:
metrics, traces and the audit chain read it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from vllm.engine.protocol import EngineClient
from vllm.exceptions import (
    GenerationError,
    RetryableRequestError,
    VLLMClientError,
    VLLMNotFoundError,
    VLLMValidationError,
)
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.renderers.params import ChatParams
from vllm.sampling_params import SamplingParams

from ..backbone.placeholders import placeholder_ids
from ..bundle import PictureRecord
from ..errors import InduceKVError, TaskDataError, UnknownBundle
from ..protocol import Decided
from ..vllm_seams.config import InduceKVConfig
from .asking import Asked, FactFinder
from .beside import judged_beside
from .journal import EngineJournal
from .observation import BundleMetrics, Observation, observing
from .owner import OWNER
from .pictures import note_pictures, read_as_task_data, record_of
from .request import (
    AdaptedMemory,
    EngineRequest,
    cache_salt_of,
    engine_request,
    memory_names,
    mm_items,
    refuse_options,
    require_rendered,
)
from .stopping import EngineStop
from .trace import describe


class MemoryRequest(LoRARequest):
    """The handle of a bundle in vLLM's table of adapters. It is never sent to the engine."""


@dataclass(frozen=True, kw_only=True)
class Lease(AdaptedMemory):
    """One version of a memory, kept resident for one request."""

    metrics: BundleMetrics  # of its name


class MemorySource(Protocol):
    """Provides memories by name."""

    def lease(self, name: str) -> AbstractContextManager[Lease]:
        """Raises UnknownBundle, or another InduceKVError if the memory cannot be used now."""
        ...


class MemoryEngine:
    """See the module docstring. There is one per engine client; all state belongs to its event loop."""

    def __init__(
        self,
        client: EngineClient,
        memories: MemorySource,
        config: InduceKVConfig,
        stop: EngineStop | None = None,
        journal: EngineJournal | None = None,
    ) -> None:
        read_as_task_data()
        note_pictures(client.renderer)
        self._client = client
        self._stop = stop or EngineStop(client)
        self._plain_generate = client.generate  # the original, before the server replaces `client.generate`
        self.facts = FactFinder(client, config)
        self._memories = memories
        self._config = config
        self._journal = journal
        self._placeholders = placeholder_ids(client.model_config.hf_config)

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

        A request is checked at the call, before its stream begins, and keeps the versions that its memories have when
        the stream begins until it ends.

        Raises:
            VLLMValidationError: the arguments do not fit the memories, or these do not go together.
            VLLMNotFoundError: a bundle has been unloaded since the server accepted the request.
            RetryableRequestError: the server is shutting down.
        """
        with self._invalidating_mm_cache(prompt):
            self._stop.refuse_new()
            if not isinstance(lora_request, MemoryRequest):
                refuse_options(sampling_params)
                return self._plain_generate(prompt, sampling_params, request_id, lora_request=lora_request, **options)
            rendered, owner = require_rendered(prompt), OWNER.get()
            names = memory_names(lora_request.lora_name, sampling_params.extra_args, self._config)
            with self._leases(names) as leases:
                request = self._request(leases, rendered, sampling_params)
        return self._generate_with_memory(names, owner, rendered, request, request_id, options)

    async def _generate_with_memory(
        self,
        names: Sequence[str],
        owner: str,
        prompt: EngineInput,
        request: EngineRequest,
        request_id: str,
        options: dict[str, Any],
    ) -> AsyncGenerator[RequestOutput, None]:
        with contextlib.ExitStack() as stack:
            with self._invalidating_mm_cache(prompt):
                stack.enter_context(self._stop.running())
                leases = stack.enter_context(self._leases(names))
                if [lease.memory for lease in leases] != list(request.memories):  # others took their places since
                    request = self._request(leases, prompt, request.user_params)
                observed = stack.enter_context(observing([lease.metrics for lease in leases]))
                before_waiting = partial(self.invalidate_mm_cache, prompt)
                asked, judging = await self.facts.asked(request.memories, prompt, before_waiting)

            def begun(asked: Asked) -> AsyncGenerator[RequestOutput, None]:
                params = request.asking(asked).params
                return self._plain_generate(prompt, params, request_id, lora_request=None, **options)

            request = request.asking(asked)
            outputs = begun(asked) if judging is None else judged_beside(begun(asked), asked, judging, begun)
            decided = Decided.without_worker(request.specs)
            packed: str | None = None
            is_noted = False
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    brought = _packed_in(output)
                    if brought is not None and brought != packed:
                        packed, decided = brought, Decided.unpack(brought)
                        if judging is not None:  # it was begun before the judge had said why no fact is found
                            decided = decided.missing([each.missed for each in judging.result()])
                    if decided is not None and decided.error is not None:
                        raise GenerationError(decided.error)
                    if not is_noted and decided is not None:
                        is_noted = True
                        await self._note(request_id, owner, leases, decided, observed)
                    if output.finished:
                        observed.finished(output)
                    if output.finished and request.is_traced and decided is not None:
                        trace = {**_described(leases, decided), "timings": observed.timings}
                        if self._journal is not None:
                            await self._journal.put_trace(owner, cache_salt_of(prompt), request_id, trace)
                        output.kv_transfer_params = {**(output.kv_transfer_params or {}), "inducekv": trace}
                    yield output

    async def picture(self, parts: Sequence[Any]) -> PictureRecord:
        """Of the pictures among the parts of a message.

        Raises:
            TaskDataError: there are none, or vLLM does not take them.
            RetryableRequestError: the server is shutting down.
        """
        self._stop.refuse_new()
        message: Any = {"role": "user", "content": list(parts)}
        try:
            _, prompt = await self._client.renderer.render_messages_async([message], ChatParams())
        except InduceKVError:
            raise
        except (VLLMClientError, ValueError, TypeError, OSError, RuntimeError) as error:  # whatever vLLM says
            raise TaskDataError(f"its picture cannot be used: {error}") from error
        return await asyncio.to_thread(record_of, prompt)

    def _request(self, leases: Sequence[Lease], prompt: EngineInput, params: SamplingParams) -> EngineRequest:
        return engine_request(leases, prompt, params, self._config, self._placeholders)

    async def _note(
        self, request_id: str, owner: str, leases: Sequence[Lease], decided: Decided, observed: Observation
    ) -> None:
        """Before the answer begins."""
        observed.decided(decided)
        if self._journal is None:
            return
        for lease, decision in zip(leases, decided.each, strict=True):
            name, memory = lease.metrics.bundle, lease.memory
            self._journal.note_decision(name, memory, decision)
            if decision.answer is not None and decision.fact is not None:
                self._journal.note_fact(name, memory.metadata.facts[decision.fact.number].id)
        if not self._config.audit_answers:
            return
        try:
            await self._journal.record_answer(request_id, owner, _described(leases, decided))
        except InduceKVError as error:  # without a record there is no answer
            raise RetryableRequestError(str(error)) from error

    @contextlib.contextmanager
    def _leases(self, names: Sequence[str]) -> Iterator[list[Lease]]:
        """The source's leases, each content once, with its errors converted to vLLM's, which HTTP answers with the
        right status.
        """
        with contextlib.ExitStack() as stack:
            try:
                leases = [stack.enter_context(self._memories.lease(name)) for name in names]
            except UnknownBundle as error:
                raise VLLMNotFoundError(str(error)) from error
            except InduceKVError as error:
                raise VLLMValidationError(str(error)) from error
            own, *others = leases
            yield [own, *(lease for lease in others if lease.memory.digest != own.memory.digest)]

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


def _described(leases: Sequence[Lease], decided: Decided) -> dict[str, Any]:
    return describe([(lease.metrics.bundle, lease.memory) for lease in leases], decided)


def pop_decided(output: RequestOutput) -> Decided | None:
    """What was decided, if an output brings it. It is taken out of vLLM's field."""
    packed = _packed_in(output)
    return None if packed is None else Decided.unpack(packed)


def _packed_in(output: RequestOutput) -> str | None:
    params = dict(output.kv_transfer_params or {})
    packed: str | None = params.pop("inducekv", None)
    output.kv_transfer_params = params or None
    return packed
