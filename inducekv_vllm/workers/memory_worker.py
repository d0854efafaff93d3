"""What the workers of all platforms share: resident bundles, decisions, and the memory of running requests.

The API process talks to a worker through the RPC methods `inducekv_*`; `protocol.py` has what a request carries.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.worker.gpu_worker import Worker

from ..attention.memory_attention import MemoryAttention, dtype_of
from ..attention.pool import ENTRY_TOKENS, MemoryPool, PoolShape
from ..attention.request_table import MemoryOfRequests
from ..attention.resident_bundle import RequestMemory, ResidentBundle, kv_heads_of_rank
from ..attention.resident_gate import ResidentGate
from ..backbone.fingerprint import backbone_fingerprint
from ..backbone.placeholders import placeholder_ids
from ..backbone.quantization import rounds_activations
from ..backbone.stored_facts import FactReader, StoredFacts
from ..bundle import BackboneFingerprint, Bundle, check_magnitudes, read_bundle
from ..engine.gate_log import GateLog
from ..errors import BundleError, CapacityError, InduceKVError, UnsupportedModel
from ..facts.pictures import LAYER
from ..host.config import InduceKVConfig
from ..host.device import Device, device_of
from ..host.logs import logger_of
from ..host.requirements import check_engine, check_maps
from ..host.runner import RunnerTables, StepRows, follow_runner
from ..protocol import STARTS, InjectionSpec, Start, parse_spec
from ..retrieval.entry_terms import EntryTerms, Retrieval, entry_terms
from .answering import AnsweringRequests, register
from .cached_values import CachedValues
from .deciding import Deciding
from .resident import ResidentBundles
from .same_pass import SamePass
from .undecided import Undecided, UndecidedRequests

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

logger = logger_of(__name__)
STEPPING_S = 0.1  # after a step the next one may follow


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
        self.resident = ResidentBundles(self._load_bundle, self._is_stepping)
        self._last_step = -math.inf  # when it began or ended
        self._rows: StepRows | None = None  # of the running step, once the runner has put its requests in order
        self._completed: list[tuple[str, Undecided]] = []  # in the running step
        self.answering = AnsweringRequests()
        # Set when the device is known, the model is loaded, and the KV cache is there.
        self.pool: MemoryPool
        self.memory_of_requests: MemoryOfRequests
        self.attention: MemoryAttention
        self.cached_values: CachedValues
        self.undecided: UndecidedRequests
        self._placeholders: frozenset[int]  # the ids of tokens that stand for media
        self.deciding: Deciding | None = None  # on the first rank
        self.same_pass: SamePass | None = None  # if it is the only one
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
        kv_heads = self.model_config.get_num_kv_heads(self.parallel_config)
        shape = PoolShape(
            entries=self.settings.memory_pool_entries,
            num_layers=self.model_config.get_num_layers(self.parallel_config),
            num_kv_heads=kv_heads,
            heads_per_kv_head=self.model_config.get_num_attention_heads(self.parallel_config) // kv_heads,
            head_size=self.model_config.get_head_size(),
        )
        dtype = dtype_of(self.model_config)
        # vLLM reports finished requests one step late, so twice as many requests as can run may hold a slot.
        num_slots = 2 * self.vllm_config.scheduler_config.max_num_seqs + 1
        self.pool = MemoryPool(shape, dtype, self._device)
        logger.info(
            "memory pool: %d tokens (%d entries of %d), %.1f MiB",
            *(shape.num_tokens, shape.entries, ENTRY_TOKENS, shape.nbytes(dtype) / 2**20),
        )
        self.memory_of_requests = MemoryOfRequests(num_slots, self._fill_slot, self.resident.release)
        self.attention = self.make_attention(num_slots, self.settings.memory_request_entries)

    def _fill_slot(self, memory: RequestMemory) -> None:
        self.attention.fill(memory)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        layers = {
            name: layer
            for name, layer in get_layers_from_vllm_config(self.vllm_config, Attention).items()
            if self._is_of_target(name)
        }
        groups = itertools.chain.from_iterable(self.model_runner.attn_groups)
        builders = [builder for group in groups for builder in group.metadata_builders]
        self.attention.attach(kv_cache_config, layers, builders)
        self.cached_values = CachedValues(kv_cache_config, layers, self.attention.cached_values, self._device)
        self._placeholders = placeholders = frozenset(placeholder_ids(self.model_config.hf_config))
        self.undecided = UndecidedRequests(
            self.cached_values, placeholders, tensor_model_parallel_all_reduce, self._all_heads, self._device
        )
        if get_tensor_model_parallel_rank() == 0:
            gate_log = GateLog.of(self.settings)
            self.deciding = Deciding(placeholders, gate_log)
            self.same_pass = self._make_same_pass(self.deciding, kv_cache_config)

    def _all_heads(self, features: Tensor) -> Tensor:
        """Features [F] of all KV heads, from those of this rank's heads."""
        heads, size = self._heads(), self.model_config.get_head_size()
        found = features.new_zeros(self.model_config.get_total_num_kv_heads() * size)
        if self._is_first_of_heads():
            found[heads.start * size : heads.stop * size] = features
        return tensor_model_parallel_all_reduce(found)

    def _heads(self) -> slice:
        """The KV heads of this rank."""
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        return kv_heads_of_rank(self.model_config.get_total_num_kv_heads(), rank, ranks)

    def _is_first_of_heads(self) -> bool:
        """Of the ranks that have the same heads."""
        rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
        return rank % max(1, ranks // self.model_config.get_total_num_kv_heads()) == 0

    def _make_same_pass(self, deciding: Deciding, kv_cache: KVCacheConfig) -> SamePass | None:
        if get_tensor_model_parallel_world_size() > 1 or len(kv_cache.kv_cache_groups) > 1:
            return None
        block_size = kv_cache.kv_cache_groups[0].kv_cache_spec.block_size
        return SamePass(self.undecided, deciding, self.attention, self._inject, self.answering.answer, block_size)

    def _is_of_target(self, layer: str) -> bool:
        """Whether it is the served model's, not that of a model that makes drafts for it."""
        num_layers = self.model_config.get_num_layers(self.parallel_config)
        return not layer.startswith("draft_model.") and extract_layer_index(layer) < num_layers

    def compile_or_warm_up_model(self) -> Any:
        self.attention.warm_up()
        return super().compile_or_warm_up_model()

    # ---- steps -------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        self._last_step = time.monotonic()
        self._device.begin_step()
        self._follow_schedule(scheduler_output)
        try:
            output: ModelRunnerOutput | AsyncModelRunnerOutput | None = super().execute_model(scheduler_output)
            if self._rows is not None:
                self._completed += self.undecided.complete(self._rows, self._runner.final_hidden)
            return output
        finally:
            self._rows = None
            self.attention.end_step()
            self._last_step = time.monotonic()

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The step's tokens, with the first rank's decisions about the prompts that the step has completed."""
        output = super().sample_tokens(grammar_output)
        completed, self._completed = self._completed, []
        if not completed or self.deciding is None:
            return output
        return self.deciding.attached(output, completed)

    def _is_stepping(self) -> bool:
        return time.monotonic() - self._last_step < STEPPING_S

    def _follow_schedule(self, scheduled: SchedulerOutput) -> None:
        """Assign slots to requests that start or resume in this step; release those of requests that stopped."""
        self.memory_of_requests.finish(list(scheduled.finished_req_ids))
        self.undecided.finish(scheduled.finished_req_ids)
        self.answering.finish(scheduled.finished_req_ids)
        self.memory_of_requests.preempt(list(scheduled.preempted_req_ids or ()))
        starts: dict[str, Start] = getattr(scheduled, STARTS, {})
        for request_id in starts:
            self.undecided.settle(request_id)
        for request in scheduled.scheduled_new_reqs:
            self._start_request(request)
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                self.memory_of_requests.resume(request_id)
                assert blocks is not None
                self.undecided.restart(request_id, blocks)
            elif blocks is not None:
                self.undecided.extend(request_id, blocks)
        for request_id, start in starts.items():
            self._start_decided(scheduled, request_id, start)

    def _start_request(self, request: NewRequestData) -> None:
        """Start a request, or resume one: to the V2 runner resumed requests come back as new.

        To any runner, so does one that was preempted before its first step.
        """
        spec = parse_spec(request.sampling_params.extra_args if request.sampling_params else None)
        if spec is not None:
            self.answering.start(request.req_id, request.sampling_params)
        if request.req_id in self.memory_of_requests:
            self.memory_of_requests.resume(request.req_id)  # its bundle may have been unloaded
        elif isinstance(spec, InjectionSpec):
            self._inject(request.req_id, spec)
        elif spec is not None and self.undecided.knows(request.req_id):
            self.undecided.restart(request.req_id, request.block_ids)
        elif spec is not None:
            bundle = self.resident[spec.bundle] if spec.bundle else None
            token_ids = request.prompt_token_ids
            assert token_ids is not None  # prompt embeddings are refused at start
            undecided = self.undecided.start(request.req_id, spec, bundle, token_ids, request.block_ids)
            if bundle is not None and self._can_decide_now(bundle, token_ids):
                self._decide_now(request.req_id, undecided)

    def _can_decide_now(self, bundle: ResidentBundle, token_ids: Sequence[int]) -> bool:
        """A bundle of facts alone needs nothing but the prompt's words. Other ranks would not hear of it in time."""
        is_alone = self.deciding is not None and get_tensor_model_parallel_world_size() == 1
        has_all = bundle.picture_marks is None or self._placeholders.isdisjoint(token_ids)
        return is_alone and bundle.facts is not None and bundle.gate is None and not bundle.num_entries and has_all

    def _decide_now(self, request_id: str, request: Undecided) -> None:
        assert self.deciding is not None
        request.decision = replace(self.deciding.decide(request), same_pass=True)
        if request.decision.facts is not None:
            self.answering.answer(request_id, request.decision.facts.answers)

    def _start_decided(self, scheduled: SchedulerOutput, request_id: str, start: Start) -> None:
        """A request goes on as it was decided; a token that was sampled before is taken back."""
        if start.media is not None:
            self._runner.give_media(request_id, start.media)
        if start.answers is not None:
            self.answering.answer(request_id, start.answers)
        if start.injection is not None:
            self._inject(request_id, start.injection)
        if start.redo_from is not None and request_id in scheduled.scheduled_cached_reqs.req_ids:
            self._runner.take_back(request_id, start.redo_from)
        if start.adapter is not None:
            self._runner.switch_adapter(request_id, start.adapter.lora_request)

    def _inject(self, request_id: str, spec: InjectionSpec) -> None:
        bundle = self.resident[spec.bundle]
        self.memory_of_requests.start(request_id, spec.content, bundle, _terms(spec, bundle), spec.start)

    def _begin_step(self, rows: StepRows) -> None:
        self._rows = rows
        self.attention.begin_step(rows)
        if self.same_pass is not None:
            self.same_pass.begin_step(rows)

    # ---- RPC methods. They return errors instead of raising, because an exception would end the engine. -----------

    def inducekv_load_bundle(self, path: str, digest: str) -> None:
        """Begin to make the bundle at `path` resident. Does nothing if its digest is resident or on its way."""
        self.resident.begin(path, digest)

    def inducekv_load_outcome(self, digest: str) -> dict[str, Any] | None:
        """Report a load that `inducekv_load_bundle` began: None while it goes on. A failure stays until the unload."""
        outcome = self.resident.outcome(digest)
        if isinstance(outcome, BaseException):
            if not isinstance(outcome, InduceKVError | OSError | MemoryError):
                logger.error("memory bundle %.12s: unexpected error", digest, exc_info=outcome)
            is_full = isinstance(outcome, CapacityError | MemoryError)
            return {"ok": False, "error": str(outcome) or repr(outcome), "is_full": is_full}
        if outcome is None:
            return None
        return {"ok": True, "resident_bytes": outcome.nbytes}

    @cached_property
    def _backbone(self) -> BackboneFingerprint:
        """Of the served model. It reads the tokenizer and holds Python's lock meanwhile, so once is enough."""
        model = self.model_config
        return backbone_fingerprint(model.model, model.revision, self.vllm_config.load_config.download_dir)

    @cached_property
    def _fact_reader(self) -> FactReader:
        return FactReader.of_engine(self.vllm_config, self._backbone)

    def _load_bundle(self, path: str, digest: str) -> ResidentBundle:
        """Read and check a bundle, and copy it to the pool; runs in a thread."""
        bundle = read_bundle(path, backbone=self._backbone)
        self._check(bundle, path, digest)
        is_first = get_tensor_model_parallel_rank() == 0
        facts = StoredFacts(bundle.metadata, self._fact_reader) if bundle.metadata.facts and is_first else None
        marks = self._fact_reader.marks if bundle.metadata.has_pictures else None
        heads, gate = self._heads(), None
        if bundle.gate is not None:
            size = bundle.metadata.backbone.head_dim
            gate = ResidentGate.load(bundle.gate, heads, size, self._is_first_of_heads(), self._device)
        return replace(self.pool.store(bundle, heads, gate), facts=facts, picture_marks=marks)

    def _check(self, bundle: Bundle, path: str, digest: str) -> None:
        """Refuse another content than the API process has read, and what this engine cannot do."""
        if bundle.digest != digest:
            raise BundleError(f"{path} changed while it was loaded: expected digest {digest}, found {bundle.digest}")
        check_magnitudes(bundle, dtype_of(self.model_config), path)
        if self.attention.most_entries is not None:
            check_most_entries(bundle, self.attention.most_entries)
        if bundle.metadata.form == "merged" and self.attention.merged_refusal is not None:
            raise self.attention.merged_refusal
        if bundle.metadata.output_map is not None:
            check_maps(bundle.metadata.output_map, self.model_config, self.parallel_config)
        if bundle.metadata.gate is not None:
            self.cached_values.check(bundle.metadata.gate.layers)
        if bundle.metadata.has_pictures and (reason := self.cached_values.refusal(LAYER)) is not None:
            raise UnsupportedModel(f"facts with pictures need the values of layer {LAYER}: {reason}")
        if bundle.metadata.facts and self.vllm_config.speculative_config is not None:
            raise UnsupportedModel("facts cannot be served with speculative decoding: vLLM takes no logits processor")

    def inducekv_unload_bundle(self, digest: str) -> dict[str, Any]:
        """Drop a bundle, or its load. Running requests keep its memory until they end."""
        return {"ok": True, "found": self.resident.unload(digest)}

    def inducekv_is_erased(self, digest: str) -> bool:
        """Whether the memory of an unloaded bundle is overwritten. It is once no running request reads it."""
        return self.resident.is_erased(digest)

    def inducekv_stats(self) -> dict[str, Any]:
        """Report what this worker holds; tests use it to check that nothing leaks."""
        slots = self.memory_of_requests.slots
        return {
            "resident": {digest: bundle.nbytes for digest, bundle in self.resident.loaded.items()},
            "pool_bytes": self.pool.shape.nbytes(dtype_of(self.model_config)),
            "pool_tokens": self.pool.shape.num_tokens,
            "pool_tokens_free": self.pool.num_free_tokens,
            "slots_used": slots.used,
            "slots": slots.capacity,
            "requests_known": len(self.undecided),
        }

    def shutdown(self) -> None:
        self.resident.close()
        if self.deciding is not None:
            self.deciding.close()
        super().shutdown()


def check_most_entries(bundle: Bundle, most: int) -> None:
    """Refuse a bundle of which one request may read more entries. Raises CapacityError."""
    tasks = Counter(entry.task for entry in bundle.metadata.entries)
    read = bundle.num_entries if bundle.gate is None else max(tasks.values())  # a gate opens for one task
    if read > most:
        raise CapacityError(
            f"a request may read {read} entries of the bundle, and {most} fit a slot; start the server with a larger "
            "memory_request_entries"
        )


def _terms(spec: InjectionSpec, bundle: ResidentBundle) -> EntryTerms:
    return entry_terms(
        Retrieval(np.asarray(spec.entries, dtype=np.int64), np.asarray(spec.weights, dtype=np.float32)),
        bundle.weighting,
        payload_tokens=bundle.payload_tokens,
        num_entries=bundle.num_entries,
        num_expired=spec.expired,
        remainder=spec.remainder,
    )
