"""vLLM's GPU worker with memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig

from ..attention.kernel_memory import KernelMemoryAttention
from ..attention.kernel_step import GraphKind
from ..attention.kernel_tables import KernelTables
from ..attention.kernels import launch
from ..attention.memory_attention import MemoryAttention
from ..backbone.memory_layers import usual_layers
from ..vllm_seams.graphs import GraphSets
from ..vllm_seams.requirements import check_gpu_runner
from .memory_worker import MemoryWorker

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class InduceKVCUDAWorker(MemoryWorker):
    attention: KernelMemoryAttention
    _graphs: GraphSets[GraphKind] | None = None

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # refuses flags that no runner could serve memory with
        check_gpu_runner(vllm_config)

    def make_attention(self, num_slots: int, most_entries: int) -> MemoryAttention:
        """The kernels read pool and tables."""
        return KernelMemoryAttention(
            self.pool,
            KernelTables(num_slots, most_entries, self.pool.shape.num_layers, self._device),
            self._device,
            self.model_config,
            launch.processors(self._device.torch_device),
            most_graph_rows=self._most_graph_rows,
            most_memories=self.settings.most_memories,
            few_layers=usual_layers(self.pool.shape.num_layers, self.model_config.get_hidden_size()) or (),
            choose_graphs=self._choose_graphs,
        )

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        if self._most_graph_rows:
            kinds, prepare = self.attention.graph_kinds, self.attention.capture_for
            self._graphs = GraphSets(self.model_runner, self.use_v2_model_runner, kinds, prepare)

    def _choose_graphs(self, kind: GraphKind) -> None:
        if self._graphs is not None:
            self._graphs.choose(kind)

    @property
    def _most_graph_rows(self) -> int:
        """Of the largest graph that has attention in it; 0 if there is none."""
        compilation = self.vllm_config.compilation_config
        return (compilation.max_cudagraph_capture_size or 0) if compilation.cudagraph_mode.has_full_cudagraphs() else 0
