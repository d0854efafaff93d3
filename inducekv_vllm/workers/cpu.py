"""vLLM's CPU worker with memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.cpu_worker import CPUWorker

from ..attention.cpu_memory import CPUMemoryAttention
from ..attention.memory_attention import MemoryAttention
from ..vllm_seams.known_bugs import check_kv_cache, check_layers
from . import cpu_lora
from .memory_worker import MemoryWorker

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class InduceKVCPUWorker(MemoryWorker, CPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if self.vllm_config.lora_config is not None and self.model_config.enforce_eager:
            cpu_lora.install()
        super().load_model(*args, **kwargs)
        check_layers(self.get_model())

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        check_kv_cache(kv_cache_config, self.vllm_config)
        super().initialize_from_config(kv_cache_config)

    def make_attention(self, num_slots: int, most_entries: int) -> MemoryAttention:
        """What a slot reads is found through the requests, without tables."""
        return CPUMemoryAttention(self.model_config)
