"""Memory attention of a CPU worker: merged memory in vLLM's CPU backend, decoupled memory around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import UnsupportedModel
from ..vllm_seams.logs import logger_of
from ..vllm_seams.requirements import check_merged
from .cpu_ops import packed_values
from .decoupled import DecoupledStep, active_rows
from .memory_attention import AttentionLayer, attach_to_decoders, dtype_of
from .merged.cpu_backend import InduceKVCPUImpl, InduceKVCPUMetadataBuilder, probe_packed_layout
from .slots import ActingRows, RequestMemory

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from ..vllm_seams.runner import StepRows

logger = logger_of(__name__)


class CPUMemoryAttention:
    """`MemoryAttention` on the CPU."""

    def __init__(self, model: ModelConfig) -> None:
        self.merged_refusal: UnsupportedModel | None = None
        self.most_entries: int | None = None
        self.decoupled = DecoupledStep()
        self._model = model
        self._merged: list[ActingRows] = []  # of merged memory, in the running step

    def attach(self, kv_cache: KVCacheConfig, layers: Mapping[str, AttentionLayer], builders: Sequence[Any]) -> None:
        try:
            check_merged(kv_cache, [(name, layer.impl) for name, layer in layers.items()], InduceKVCPUImpl, self._model)
            self._prepare_merged(kv_cache, builders)
        except UnsupportedModel as refusal:
            self.merged_refusal = refusal
            logger.info("only decoupled memory can be served: %s", refusal)
        attach_to_decoders(layers, self.decoupled)

    def _prepare_merged(self, kv_cache: KVCacheConfig, builders: Sequence[Any]) -> None:
        for builder in builders:
            assert isinstance(builder, InduceKVCPUMetadataBuilder)
            if builder.block_size != kv_cache.kv_cache_groups[0].kv_cache_spec.block_size:
                raise UnsupportedModel("merged memory cannot be served: KV-cache blocks are split for the kernel")
            probe_packed_layout(builder.isa, dtype_of(self._model), builder.head_dim, builder.block_size)
            builder.merged_rows = lambda: self._merged

    def cached_values(self, kv_cache: Tensor) -> Tensor:
        return packed_values(kv_cache)

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def fill(self, memory: RequestMemory) -> None:
        """Nothing is copied: the steps read the memory itself."""

    def begin_step(self, rows: StepRows, acting: Sequence[ActingRows]) -> None:
        self._merged = [each for each in acting if each.memory.bundle.form == "merged"]
        self.decoupled.merged = active_rows(self._merged)
        self.decoupled.active = active_rows([each for each in acting if each.memory.bundle.form == "decoupled"])

    def decide_in(self, layer: int, decide: Callable[[], None]) -> None:
        self.decoupled.deciding[layer] = decide

    def end_step(self) -> None:
        self._merged = []
        self.decoupled.deciding.clear()
        self.decoupled.active, self.decoupled.merged = [], []
