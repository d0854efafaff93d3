"""What the workers of all platforms share: resident bundles, decisions, and the memory of running requests.

The API process talks to a worker through the RPC methods `inducekv_*`; `protocol.py` has what a request carries.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.worker.gpu_worker import Worker

from ..attention.host_bundle import HostBundle
from ..attention.memory_attention import MOST_REQUEST_ENTRIES, MemoryAttention, dtype_of, require_layers
from ..attention.pool import ENTRY_TOKENS, MemoryPool, PoolShape
from ..attention.query_order import in_served_order
from ..attention.resident_bundle import ResidentBundle, kv_heads_of_rank
from ..attention.resident_gate import ResidentGate
from ..attention.slots import Slots
from ..backbone.fact_reader import FactReader
from ..backbone.fingerprint import backbone_fingerprint
from ..backbone.memory_layers import Heads, layer_kinds, layers_with_attention, memory_layers
from ..backbone.placeholders import placeholder_ids
from ..backbone.quantization import rounds_activations
from ..backbone.stored_facts import StoredAnswers
from ..bundle import MAX_SERVED_BYTES, BackboneFingerprint, read_bundle
from ..errors import InduceKVError
from ..vllm_seams.config import InduceKVConfig
from ..vllm_seams.device import Device, device_of
from ..vllm_seams.logs import logger_of
from ..vllm_seams.requirements import check_engine
from ..vllm_seams.runner import RunnerTables, StepRows, follow_runner
from .adapters import unmet_tensors
from .answering import register
from .cached_values import CachedValues
from .decisions import Deciding, StepDecisions
from .prompts import PromptReader
from .refusals import check_bundle, kind_of, served_heads
from .requests import WorkerRequests, acting_rows
from .resident import ResidentBundles
from .steps import Steps

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

logger = logger_of(__name__)


class MemoryWorker(Worker):
    """vLLM's worker with memory. A subclass for each platform has that platform's memory attention."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        named = InduceKVConfig.named_alone(vllm_config)
        if (settings := InduceKVConfig.from_vllm(vllm_config)) is None:
            # The attention backend recognises an engine with memory by this key.
            vllm_config.additional_config = named.additional_config
        self.settings = settings or InduceKVConfig()
        vllm_config = named
        check_engine(vllm_config)
        register(vllm_config, is_v2=bool(vllm_config.use_v2_model_runner))
        super().__init__(vllm_config, *args, **kwargs)
        self.steps = Steps()
        self.resident = ResidentBundles(
            self._read_bundle, self._store_bundle, self.steps, self.settings.memory_host_bytes
        )
        self._rows: StepRows | None = None  # of the running step, once the runner has put its requests in order
        # Set when the device is known, the model is loaded, and the KV cache is there.
        self.pool: MemoryPool
        self.requests: WorkerRequests
        self.attention: MemoryAttention
        self.cached_values: CachedValues
        self.decisions: StepDecisions
        self._device: Device
        self._runner: RunnerTables

    def make_attention(self, num_slots: int, most_entries: int) -> MemoryAttention:
        """The platform's memory attention over the pool, for slots of up to so many entries."""
        raise NotImplementedError

    # ---- start -------------------------------------------------------------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        assert self.device is not None  # set before the model is loaded
        self._device = device_of(self.device)
        self._allocate_memory()
        self._runner = follow_runner(self.model_runner, self.use_v2_model_runner, self._begin_step)
        quantization = self.model_config.model_arch_config.quantization_config
        if quantization is not None and rounds_activations(quantization):
            logger.warning(
                "this checkpoint's activations may be quantised, too: memory was taught with those that are not, and "
                "a gate may decide otherwise near its thresholds"
            )
        logger.info("memory follows vLLM's %s model runner", "V2" if self.use_v2_model_runner else "V1")

    def _allocate_memory(self) -> None:
        """Allocate the pool and the tables of slots, before vLLM measures the memory that is left for the KV cache."""
        heads, ranks = self._all_ranks, self.parallel_config.tensor_parallel_size
        kv_heads = max(1, heads.num_kv_heads // ranks)
        shape = PoolShape(
            entries=self.settings.memory_pool_entries,
            num_layers=len(self._memory_layers),
            num_kv_heads=kv_heads,
            heads_per_kv_head=heads.num_heads // ranks // kv_heads,
            head_size=heads.head_dim,
            value_size=heads.value_dim,
        )
        dtype = dtype_of(self.model_config)
        # vLLM reports finished requests one step late, so twice as many requests as can run may hold their slots.
        num_slots = 2 * self.vllm_config.scheduler_config.max_num_seqs * self.settings.most_memories + 1
        self.pool = MemoryPool(shape, dtype, self._device)
        logger.info(
            "memory pool: %d tokens (%d entries of %d), %.1f MiB",
            shape.num_tokens,
            shape.entries,
            ENTRY_TOKENS,
            shape.nbytes(dtype) / 2**20,
        )
        slots = Slots(num_slots, lambda memory: self.attention.fill(memory))
        self.requests = WorkerRequests(
            slots,
            self.resident.__getitem__,
            self.resident.release,
            lambda request_id: self._runner.process_logits(request_id),
        )
        self.attention = self.make_attention(num_slots, min(self.settings.memory_pool_entries, MOST_REQUEST_ENTRIES))

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        layers: dict[str, Any] = {
            name: layer
            for kind in (Attention, MLAAttention)
            for name, layer in get_layers_from_vllm_config(self.vllm_config, kind).items()
            if self._is_of_target(name)
        }
        require_layers(layers, self._attention_layers)
        layers = {name: layer for name, layer in layers.items() if extract_layer_index(name) in self._memory_layers}
        groups = itertools.chain.from_iterable(self.model_runner.attn_groups)
        builders = [builder for group in groups for builder in group.metadata_builders]
        self.attention.attach(kv_cache_config, layers, builders)
        self.cached_values = CachedValues(kv_cache_config, layers, self.attention.cached_values, self._device)
        placeholders = frozenset(placeholder_ids(self.model_config.hf_config))
        prompts = PromptReader(self.cached_values, placeholders, tensor_model_parallel_all_reduce, self._device)
        is_first, is_alone = get_tensor_model_parallel_rank() == 0, get_tensor_model_parallel_world_size() == 1
        deciding = Deciding(placeholders) if is_first else None
        self.decisions = StepDecisions(self.requests, prompts, deciding, self.attention, is_alone=is_alone)

    def _heads(self) -> slice:
        """The KV heads of this rank."""
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        return kv_heads_of_rank(self._all_ranks.num_kv_heads, rank, ranks)

    def _is_first_of_heads(self) -> bool:
        """Of the ranks that have the same heads."""
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        return rank % max(1, ranks // self._all_ranks.num_kv_heads) == 0

    @cached_property
    def _all_ranks(self) -> Heads:
        """The heads of all ranks; latents are one head, which each of them has."""
        return served_heads(self.model_config)

    @cached_property
    def _attention_layers(self) -> tuple[int, ...]:
        """The numbers of the served model's layers with attention."""
        num_layers = self.model_config.get_num_layers(self.parallel_config)
        return layers_with_attention(layer_kinds(self.model_config.hf_text_config), num_layers)

    @cached_property
    def _memory_layers(self) -> tuple[int, ...]:
        """The numbers of those that memory acts in."""
        return memory_layers(self.model_config.hf_text_config)

    def _is_of_target(self, layer: str) -> bool:
        """Whether it is the served model's, not that of a model that makes drafts for it."""
        num_layers = self.model_config.get_num_layers(self.parallel_config)
        return not layer.startswith("draft_model.") and extract_layer_index(layer) < num_layers

    def compile_or_warm_up_model(self) -> Any:
        self.attention.warm_up()
        found = super().compile_or_warm_up_model()
        self.resident.prepare(lambda: self._fact_reader)
        return found

    # ---- steps -------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        self.steps.begin()
        self._device.begin_step()
        self.requests.follow(scheduler_output, self._runner)
        try:
            output: ModelRunnerOutput | AsyncModelRunnerOutput | None = super().execute_model(scheduler_output)
            if self._rows is not None:
                self.decisions.after_pass(self._rows, self._runner.final_hidden)
            if output is not None:  # otherwise `sample_tokens` ends the step
                self.steps.end()
            return output
        finally:
            self._rows = None
            self.attention.end_step()

    def sample_tokens(self, grammar_output: Any) -> Any:
        try:
            return self.decisions.attached(super().sample_tokens(grammar_output))
        finally:
            self.steps.end()

    def _begin_step(self, rows: StepRows) -> None:
        self._rows = rows
        self.attention.begin_step(rows, acting_rows(self.requests.by_id, rows))
        self.decisions.begin_step(rows)

    # ---- RPC methods. They return errors instead of raising, because an exception would end the engine. -----------

    def inducekv_load_bundle(self, path: str, digest: str) -> dict[str, Any] | None:
        """Begin to make the bundle at `path` resident, unless its digest is. Answers like `inducekv_load_outcome`."""
        self.resident.begin(path, digest)
        return self.inducekv_load_outcome(digest)

    def inducekv_load_outcome(self, digest: str) -> dict[str, Any] | None:
        """Report a load that `inducekv_load_bundle` began: None while it goes on. A failure stays until the unload."""
        outcome = self.resident.outcome(digest)
        if isinstance(outcome, BaseException):
            if not isinstance(outcome, InduceKVError | OSError | MemoryError):
                logger.error("memory bundle %.12s: unexpected error", digest, exc_info=outcome)
            return {"ok": False, "error": str(outcome) or repr(outcome), "kind": kind_of(outcome)}
        if outcome is None:
            return None
        return {"ok": True, "resident_bytes": outcome.nbytes}

    @cached_property
    def _backbone(self) -> BackboneFingerprint:
        """Of the served model. It reads the tokenizer and holds Python's lock meanwhile, before requests run."""
        model = self.model_config
        return backbone_fingerprint(model.model, model.revision, self.vllm_config.load_config.download_dir)

    @cached_property
    def _fact_reader(self) -> FactReader:
        return FactReader.of_engine(self.vllm_config, self._backbone)

    def _read_bundle(self, path: str, digest: str) -> HostBundle:
        """Read and check a bundle; runs in a thread."""
        bundle = read_bundle(path, backbone=self._backbone, max_bytes=MAX_SERVED_BYTES)
        check_bundle(bundle, path, digest, self.vllm_config, self.attention, self.cached_values)
        is_first = get_tensor_model_parallel_rank() == 0
        facts = StoredAnswers(bundle.metadata, self._fact_reader) if bundle.metadata.facts and is_first else None
        words = bundle.gate.word_scores if bundle.gate is not None and is_first else None
        reader = None if words is None and facts is None else self._fact_reader
        return HostBundle.of(in_served_order(bundle, self.model_runner.get_model()), words, facts, reader)

    def _store_bundle(self, host: HostBundle) -> ResidentBundle:
        """Copy a bundle to the device; runs in a thread."""
        heads, gate, size = self._heads(), host.bundle.gate, host.bundle.metadata.backbone.value_size
        on_device = (
            None if gate is None else ResidentGate.load(gate, heads, size, self._is_first_of_heads(), self._device)
        )
        return self.pool.store(host, heads, on_device)

    def inducekv_unload_bundle(self, digest: str, keep: bool = False) -> dict[str, Any]:
        """Drop a bundle, or its load. Running requests keep its memory until they end.

        With `keep` it stays in host memory, as far as there is room, to be loaded again; without, nothing stays.
        """
        return {"ok": True, "found": self.resident.unload(digest, keep=keep)}

    def inducekv_unmet_tensors(self, names: list[str]) -> list[str]:
        return unmet_tensors(self.model_runner.lora_manager._adapter_manager, names)

    def inducekv_is_erased(self, digest: str) -> bool:
        """Whether the memory of an unloaded bundle is overwritten. It is once no running request reads it.

        What was not kept is gone from host memory, too.
        """
        return self.resident.is_erased(digest)

    def inducekv_stats(self) -> dict[str, Any]:
        """Report what this worker holds, and the size of its pool."""
        slots = self.requests.slots
        return {
            "resident": {digest: bundle.nbytes for digest, bundle in self.resident.loaded.items()},
            "pool_bytes": self.pool.shape.nbytes(dtype_of(self.model_config)),
            "pool_tokens": self.pool.shape.num_tokens,
            "heads_per_kv_head": self.pool.shape.heads_per_kv_head,
            "pool_tokens_free": self.pool.num_free_tokens,
            "host_bytes": self.resident.host_bytes,
            "slots_used": slots.used,
            "slots": slots.capacity,
            "requests_known": len(self.requests.by_id),
        }

    def shutdown(self) -> None:
        self.resident.close()
        super().shutdown()
