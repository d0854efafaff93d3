"""vLLM's CPU worker with memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_worker import CPUWorker

from ..attention.cpu_memory import CPUMemoryAttention
from ..attention.memory_attention import MemoryAttention
from ..pace import leave_cores_of_steps
from ..vllm_seams.requirements import (
    check_cpu_experts,
    check_cpu_rotation,
    check_cpu_states,
    check_cpu_weights,
    groups_adapters,
)
from . import cpu_lora
from .memory_worker import MemoryWorker

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class InduceKVCPUWorker(MemoryWorker, CPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if groups_adapters(self.vllm_config):
            cpu_lora.install()
        super().load_model(*args, **kwargs)
        check_cpu_weights(self.get_model())
        check_cpu_rotation(self.get_model())
        check_cpu_experts(self.get_model())

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        check_cpu_states(kv_cache_config, self.vllm_config)
        super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        self.resident.prepare(leave_cores_of_steps)
        return super().compile_or_warm_up_model()

    def make_attention(self, num_slots: int, most_entries: int) -> MemoryAttention:
        """What a slot reads is found through the requests, without tables."""
        return CPUMemoryAttention(self.model_config)
