"""Memory for `vllm.LLM`: two batched passes over the offline engine.

    llm = LLM(
        MODEL,
        worker_cls="inducekv_vllm.worker.InduceKVWorker",
        scheduler_cls="inducekv_vllm.scheduler.memory_scheduler",
        additional_config={"inducekv": {}},
    )
    offline = MemoryLLM(llm)
    memory = offline.load_bundle("shapes.safetensors")
    answers = offline.chat(conversations, SamplingParams(max_tokens=16), memory=memory)

Shapes: N prompts, k entries retrieved.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from vllm import LLM
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from ..backbone.fingerprint import backbone_fingerprint
from ..backbone.placeholders import placeholder_ids
from ..bundle import read_bundle, read_public_key, require_signature
from ..errors import CapacityError, ConfigError, UnknownBundle, UnsupportedModel
from ..gate import GateDecision
from ..host.config import InduceKVConfig
from ..retrieval.page_terms import Retrieval
from .gate_log import GateLog
from .memory_index import MemoryIndex, MemoryLookup, QueryFeatures
from .passes import (
    answer_pass_params,
    answer_pass_prompt,
    decode_features,
    key_pass_params,
    make_injection_spec,
    require_rendered,
)
from .wire import InjectionSpec, poll_delays

_T = TypeVar("_T")


@dataclass(frozen=True)
class MemoryAnswer:
    """One prompt's answer. The other fields are None for a prompt without memory."""

    output: RequestOutput
    query: QueryFeatures | None
    retrieval: Retrieval | None  # k entries and weights; None if the gate is closed
    gate_decision: GateDecision | None  # None for a memory without a gate


class MemoryLLM:
    """An `LLM` with memories. Bundles stay loaded until `unload_bundle` or the end of the engine."""

    def __init__(self, llm: LLM) -> None:
        """Open the gate log, if there is one, and read the public keys.

        Raises:
            UnsupportedModel: the engine was started without the memory worker.
            ConfigError: a file cannot be used.
        """
        self.llm = llm
        vllm_config = llm.llm_engine.vllm_config
        self.config = InduceKVConfig.from_vllm(vllm_config) or InduceKVConfig()
        try:
            llm.collective_rpc("inducekv_stats")
        except Exception as error:
            raise UnsupportedModel(
                'the engine\'s workers do not support memory: LLM(worker_cls="inducekv_vllm.worker.InduceKVWorker")'
            ) from error
        model, cache = vllm_config.model_config, vllm_config.load_config.download_dir
        self._backbone = backbone_fingerprint(model.model, model.revision, cache)
        self._placeholders = placeholder_ids(vllm_config.model_config.hf_config)
        self._signers = [read_public_key(path) for path in self.config.require_signature]
        self._gate_log = GateLog.of(self.config)
        self._loaded: dict[str, MemoryIndex] = {}  # by digest

    def load_bundle(self, path: str | os.PathLike[str]) -> MemoryIndex:
        """Check a bundle and make it resident on every rank.

        Raises:
            BundleError: the file is not a valid bundle, or was made for another backbone.
            UnsupportedModel: it sends tasks to LoRA adapters, which only the server does.
            CapacityError: a worker cannot load it.
        """
        absolute = os.path.abspath(path)
        bundle = read_bundle(absolute, backbone=self._backbone, name=str(path))
        if self._signers:
            require_signature(bundle.signature, bundle.digest, self._signers, str(path))
        if bundle.metadata.task_adapters:
            raise UnsupportedModel(f"{path} sends tasks to LoRA adapters: serve it with inducekv-serve")
        self.llm.collective_rpc("inducekv_load_bundle", args=(absolute, bundle.digest))
        answers: list[Any]
        delays = poll_delays()
        while None in (answers := self.llm.collective_rpc("inducekv_load_outcome", args=(bundle.digest,))):
            time.sleep(next(delays))
        if refusals := [answer["error"] for answer in answers if not answer["ok"]]:
            self.llm.collective_rpc("inducekv_unload_bundle", args=(bundle.digest,))
            raise CapacityError(f"the engine cannot load {path}: {refusals[0]}")
        if bundle.digest not in self._loaded:
            self._loaded[bundle.digest] = MemoryIndex.from_bundle(bundle, absolute)
        return self._loaded[bundle.digest]

    def unload_bundle(self, memory: MemoryIndex) -> None:
        """Drop `memory` here and in the workers. Raises UnknownBundle if it is not loaded."""
        if self._loaded.pop(memory.digest, None) is None:
            raise UnknownBundle(f"no memory bundle {memory.path} is loaded")
        self.llm.collective_rpc("inducekv_unload_bundle", args=(memory.digest,))

    def chat(
        self,
        conversations: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        memory: MemoryIndex | Sequence[MemoryIndex | None] | None = None,
        top_k: int | None = None,
        remainder: bool | None = None,
        adapter: LoRARequest | None = None,
        **chat_options: Any,
    ) -> list[MemoryAnswer]:
        """`LLM.chat` over N conversations, each with a memory or none.

        Args:
            conversations: N lists of OpenAI messages.
            params: one for all, or N.
            memory: one for all, or N; prompts with different memories and with none run in one batch.
            top_k: entries retrieved; None for the engine's setting.
            remainder: weighting "sqrt" with top_k: entries not retrieved stay in the softmax with alpha = 0. None for
                the engine's setting.
            adapter: the LoRA adapter that the memories need.
            chat_options: rendering options of `LLM.chat`, such as `chat_template_kwargs`.
        """
        renders = [partial(self.llm._preprocess_chat_one, each, **chat_options) for each in conversations]
        return self._answer(renders, params, memory, top_k, remainder, adapter)

    def generate(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        memory: MemoryIndex | Sequence[MemoryIndex | None] | None = None,
        top_k: int | None = None,
        remainder: bool | None = None,
        adapter: LoRARequest | None = None,
    ) -> list[MemoryAnswer]:
        """`LLM.generate` over N prompts; the arguments are those of `chat`."""
        renders = [partial(self.llm._preprocess_cmpl_one, each) for each in prompts]
        return self._answer(renders, params, memory, top_k, remainder, adapter)

    def _answer(
        self,
        renders: Sequence[Callable[[], EngineInput]],
        params: SamplingParams | Sequence[SamplingParams],
        memory: MemoryIndex | Sequence[MemoryIndex | None] | None,
        top_k: int | None,
        remainder: bool | None,
        adapter: LoRARequest | None,
    ) -> list[MemoryAnswer]:
        all_params = _one_each(params, len(renders), "params")
        memories = _one_each(memory, len(renders), "memory")
        for memory_index in memories:
            self._check(memory_index, adapter)
        if remainder is None:
            remainder = self.config.remainder

        passes = self._key_passes(renders, memories, adapter)
        lookups = [MemoryLookup(None, None)] * len(renders)
        specs: list[InjectionSpec | None] = [None] * len(renders)
        for i, memory_index in enumerate(memories):
            if memory_index is not None:
                query, token_ids = passes[i]
                lookups[i] = memory_index.lookup(query, top_k or self.config.top_k)
                self._gate_log.note(memory_index, query, lookups[i])
                specs[i] = make_injection_spec(memory_index, lookups[i], remainder, token_ids, self._placeholders)

        # Render again: vLLM's two caches of processed images stay in step because they see the same sequence.
        outputs = self._run(
            (answer_pass_prompt(render(), spec) for render, spec in zip(renders, specs, strict=True)),
            [answer_pass_params(user_params, spec) for user_params, spec in zip(all_params, specs, strict=True)],
            adapter,
        )
        return [
            MemoryAnswer(output, passes[i][0] if i in passes else None, lookups[i].retrieval, lookups[i].gate_decision)
            for i, output in enumerate(outputs)
        ]

    def _key_passes(
        self,
        renders: Sequence[Callable[[], EngineInput]],
        memories: Sequence[MemoryIndex | None],
        adapter: LoRARequest | None,
    ) -> dict[int, tuple[QueryFeatures, Sequence[int]]]:
        """Pass one, for each of the N prompts with memory: what it finds, and the prompt's token ids."""
        asked = {i: (memory, uuid.uuid4().hex) for i, memory in enumerate(memories) if memory is not None}
        try:
            prompts = (require_rendered(renders[i]()) for i in asked)
            outputs = self._run(
                prompts, [key_pass_params(key_id, memory) for memory, key_id in asked.values()], adapter
            )
            return {
                i: (self._fetch(memory, key_id), output.prompt_token_ids)
                for (i, (memory, key_id)), output in zip(asked.items(), outputs, strict=True)
                if output.prompt_token_ids is not None  # prompt embeddings are refused at start
            }
        except BaseException:
            for _, key_id in asked.values():
                self.llm.collective_rpc("inducekv_drop_key", args=(key_id,))
            raise

    def _fetch(self, memory: MemoryIndex, key_id: str) -> QueryFeatures:
        if not memory.needs_key_pass:  # it only told the prompt's tokens
            return QueryFeatures()
        return decode_features(self.llm.collective_rpc("inducekv_pop_key", args=(key_id,)))

    def _run(
        self, prompts: Iterable[EngineInput], params: Sequence[SamplingParams], adapter: LoRARequest | None
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = self.llm._render_and_run_requests(
            prompts=prompts,
            params=params,
            output_type=RequestOutput,
            lora_requests=[adapter] * len(params),
            use_tqdm=False,
        )
        return outputs

    def _check(self, memory: MemoryIndex | None, adapter: LoRARequest | None) -> None:
        if memory is None:
            return
        if memory.digest not in self._loaded:
            raise UnknownBundle(f"no memory bundle {memory.path} is loaded")
        name = adapter.lora_name if adapter is not None else None
        if memory.adapter != name:
            raise UnsupportedModel(f"{memory.path} was made with the LoRA adapter {memory.adapter}, found {name}")


def _one_each(value: _T | Sequence[_T], count: int, name: str) -> list[_T]:
    """Repeat `value` for `count` prompts. Raises ConfigError if it is a sequence with another length."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"expected one value or {count} for {name}, found {len(value)}")
    return list(value)
