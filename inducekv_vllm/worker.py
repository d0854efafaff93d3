"""The worker of the served platform. `--worker-cls inducekv_vllm.worker.InduceKVWorker` selects it.

Only `device.py`, which moves tensors, `requirements.py` and `cpu_lora.py` ask for the platform again. `plugin.py`
registers the attention backends of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform

from .errors import UnsupportedModel

if TYPE_CHECKING:
    from .workers.memory_worker import MemoryWorker


def worker_class() -> type[MemoryWorker]:
    """Raises UnsupportedModel on a platform without memory attention."""
    # Each platform's modules import only there: on others they can fail with an unrelated message.
    if current_platform.is_cpu():
        from .workers.cpu import InduceKVCPUWorker

        return InduceKVCPUWorker
    if current_platform.is_cuda():
        from .workers.cuda import InduceKVCUDAWorker

        return InduceKVCUDAWorker
    raise UnsupportedModel(f"InduceKV serves on CPUs and NVIDIA GPUs, found {current_platform.device_name}")


InduceKVWorker = worker_class()
