"""vLLM's GPU worker with memory."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from ..attention.kernel_memory import KernelMemoryAttention
from ..attention.kernel_tables import KernelTables
from ..attention.kernels import launch
from ..attention.memory_attention import MemoryAttention
from ..errors import UnsupportedModel
from ..vllm_seams.requirements import check_gpu_runner
from .memory_worker import MemoryWorker


class InduceKVCUDAWorker(MemoryWorker):
    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # refuses flags that no runner could serve memory with
        check_gpu_runner(vllm_config)
        if self.settings.max_memories > 1:
            raise UnsupportedModel("a request on a GPU can have one memory alone: start without --memory-shared")

    def make_attention(self, num_slots: int, most_entries: int) -> MemoryAttention:
        """The kernels read pool and tables."""
        compilation = self.vllm_config.compilation_config
        graphs = compilation.cudagraph_mode.has_full_cudagraphs()
        return KernelMemoryAttention(
            self.pool,
            KernelTables(num_slots, most_entries, self.pool.shape.num_layers, self._device),
            self._device,
            self.model_config,
            launch.processors(self._device.torch_device),
            most_graph_rows=(compilation.max_cudagraph_capture_size or 0) if graphs else 0,
        )
