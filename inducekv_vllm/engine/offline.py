"""Memory for `vllm.LLM`: two batched passes over the ordinary offline engine.

    llm = LLM(MODEL, worker_cls="inducekv_vllm.worker.InduceKVWorker", additional_config={"inducekv": {}})
    offline = MemoryLLM(llm)
    memory = offline.load_bundle("shapes.safetensors")
    answers = offline.chat(conversations, SamplingParams(max_tokens=16), memory=memory)

Letters: N prompts, k entries retrieved, d hidden size.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm import LLM
from vllm.inputs import EngineInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from ..bundle import read_bundle
from ..config import InduceKVConfig
from ..errors import CapacityError, ConfigError, UnknownBundle, UnsupportedModel
from ..fingerprint import backbone_fingerprint
from ..gate import Relevance
from ..retrieval import FloatArray, Retrieval
from .memory_index import Memory, Recall
from .passes import answer_pass_params, answer_pass_prompt, decode_key, key_pass_params, order_memory, require_rendered
from .wire import MemoryOrder

_T = TypeVar("_T")


@dataclass(frozen=True)
class MemoryAnswer:
    """One prompt's answer, and what it was answered with (None for a prompt without memory)."""

    output: RequestOutput
    key: FloatArray | None  # [2, d] float32, see `query_keys.QueryKey`
    retrieval: Retrieval | None  # k entries and weights; None too where the memory's gate is closed
    relevance: Relevance | None  # the gate's verdict; None too for a memory without a gate


class MemoryLLM:
    """An `LLM` with memories. Bundles stay loaded until `unload_bundle`, or the engine's end."""

    def __init__(self, llm: LLM) -> None:
        """Raises UnsupportedModel when the engine was not started with the memory worker."""
        self.llm = llm
        vllm_config = llm.llm_engine.vllm_config
        self.config = InduceKVConfig.from_vllm(vllm_config) or InduceKVConfig()
        try:
            llm.collective_rpc("inducekv_stats")
        except Exception as error:
            raise UnsupportedModel(
                'the engine\'s workers know nothing of memory: LLM(worker_cls="inducekv_vllm.worker.InduceKVWorker")'
            ) from error
        self._backbone = backbone_fingerprint(vllm_config.model_config.model, vllm_config.model_config.revision)
        self._loaded: dict[str, Memory] = {}  # by digest

    def load_bundle(self, path: str | os.PathLike[str]) -> Memory:
        """Check a bundle and make it resident on every rank.

        Raises:
            BundleError: the file is not a sound bundle, or one for another backbone.
            CapacityError: a worker could not take it.
        """
        absolute = os.path.abspath(path)
        bundle = read_bundle(absolute)
        bundle.require_backbone(self._backbone, str(path))
        answers: list[dict[str, Any]] = self.llm.collective_rpc("inducekv_load_bundle", args=(absolute, bundle.digest))
        if refusals := [answer["error"] for answer in answers if not answer["ok"]]:
            self.llm.collective_rpc("inducekv_unload_bundle", args=(bundle.digest,))
            raise CapacityError(f"the engine cannot load {path}: {refusals[0]}")
        self._loaded[bundle.digest] = Memory.from_bundle(bundle, absolute)
        return self._loaded[bundle.digest]

    def unload_bundle(self, memory: Memory) -> None:
        """Free the workers' copy. Raises UnknownBundle when it is not loaded."""
        if self._loaded.pop(memory.digest, None) is None:
            raise UnknownBundle(f"no memory bundle {memory.path} is loaded")
        self.llm.collective_rpc("inducekv_unload_bundle", args=(memory.digest,))

    def chat(
        self,
        conversations: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        memory: Memory | Sequence[Memory | None] | None = None,
        top_k: int | None = None,
        remainder: bool | None = None,
        adapter: LoRARequest | None = None,
        **chat_options: Any,
    ) -> list[MemoryAnswer]:
        """`LLM.chat` over N conversations, each with its memory or none.

        Args:
            conversations: N lists of OpenAI messages.
            params: for all, or N.
            memory: for all, or N; prompts of several memories and none run in one batch.
            top_k: entries retrieved; None takes the engine's setting.
            remainder: weighting "sqrt" with top_k: keep what is not retrieved at alpha = 0; None: the engine's setting.
            adapter: the LoRA adapter that the memories need.
            chat_options: of `LLM.chat`'s rendering, such as `chat_template_kwargs`.
        """

        def render(index: int) -> EngineInput:
            return self.llm._preprocess_chat_one(conversations[index], **chat_options)

        return self._answer(render, len(conversations), params, memory, top_k, remainder, adapter)

    def generate(
        self,
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        memory: Memory | Sequence[Memory | None] | None = None,
        top_k: int | None = None,
        remainder: bool | None = None,
        adapter: LoRARequest | None = None,
    ) -> list[MemoryAnswer]:
        """`LLM.generate` over N prompts, otherwise like `chat`."""

        def render(index: int) -> EngineInput:
            return self.llm._preprocess_cmpl_one(prompts[index])

        return self._answer(render, len(prompts), params, memory, top_k, remainder, adapter)

    def _answer(
        self,
        render: Callable[[int], EngineInput],
        num_prompts: int,
        params: SamplingParams | Sequence[SamplingParams],
        memory: Memory | Sequence[Memory | None] | None,
        top_k: int | None,
        remainder: bool | None,
        adapter: LoRARequest | None,
    ) -> list[MemoryAnswer]:
        all_params = _one_each(params, num_prompts, "params")
        memories = _one_each(memory, num_prompts, "memory")
        for each in memories:
            self._check(each, adapter)
        if remainder is None:
            remainder = self.config.remainder

        chosen = [i for i, each in enumerate(memories) if each is not None]
        keys = dict(zip(chosen, self._query_keys(map(render, chosen), len(chosen), adapter), strict=True))
        recalls = [Recall(None, None)] * num_prompts
        orders: list[MemoryOrder | None] = [None] * num_prompts
        for i, each in enumerate(memories):
            if each is not None:
                recalls[i] = each.recall(keys[i], top_k or self.config.top_k)
                orders[i] = order_memory(each, recalls[i], remainder)

        # Rendered anew, not kept: vLLM's two caches of processed pictures stay in step by seeing the same sequence.
        outputs = self._run(
            (answer_pass_prompt(render(i), order) for i, order in enumerate(orders)),
            [answer_pass_params(each, order) for each, order in zip(all_params, orders, strict=True)],
            adapter,
        )
        return [
            MemoryAnswer(output, keys.get(i), recalls[i].retrieval, recalls[i].relevance)
            for i, output in enumerate(outputs)
        ]

    def _query_keys(
        self, prompts: Iterable[EngineInput], num_prompts: int, adapter: LoRARequest | None
    ) -> list[FloatArray]:
        """Pass one: the keys [2, d] of N rendered prompts."""
        key_ids = [uuid.uuid4().hex for _ in range(num_prompts)]
        try:
            self._run(map(require_rendered, prompts), [key_pass_params(key_id) for key_id in key_ids], adapter)
            return [decode_key(self.llm.collective_rpc("inducekv_pop_key", args=(key_id,))) for key_id in key_ids]
        except BaseException:
            for key_id in key_ids:
                self.llm.collective_rpc("inducekv_drop_key", args=(key_id,))
            raise

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

    def _check(self, memory: Memory | None, adapter: LoRARequest | None) -> None:
        if memory is None:
            return
        if memory.digest not in self._loaded:
            raise UnknownBundle(f"no memory bundle {memory.path} is loaded")
        given = adapter.lora_name if adapter is not None else None
        if memory.adapter != given:
            raise UnsupportedModel(f"{memory.path} was made with the LoRA adapter {memory.adapter}, found {given}")


def _one_each(value: _T | Sequence[_T], count: int, name: str) -> list[_T]:
    """`value` for each of `count` prompts; raises ConfigError when it is a sequence of another length."""
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"expected one value or {count} for {name}, found {len(value)}")
    return list(value)
