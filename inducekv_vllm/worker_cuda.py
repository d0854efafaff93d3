"""vLLM's GPU worker with memory."""

from __future__ import annotations

from .attention.kernel_memory import KernelMemoryAttention
from .attention.kernels import launch
from .attention.memory_attention import MemoryAttention
from .attention.term_tables import TermTables
from .memory_worker import MemoryWorker


class InduceKVCUDAWorker(MemoryWorker):
    def make_attention(self, tables: TermTables) -> MemoryAttention:
        """The kernels read pool and tables."""
        compilation = self.vllm_config.compilation_config
        graphs = compilation.cudagraph_mode.has_full_cudagraphs()
        return KernelMemoryAttention(
            self.pool,
            tables,
            self.memory_of_requests,
            self._device,
            self.model_config,
            launch.processors(self._device.torch_device),
            most_graph_rows=(compilation.max_cudagraph_capture_size or 0) if graphs else 0,
        )
