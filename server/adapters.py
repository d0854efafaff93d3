"""The LoRA adapters of a bundle's tasks, as vLLM knows them."""

import hashlib
from pathlib import Path

from vllm.lora.request import LoRARequest

from inducekv_vllm.bundle import AdapterRecord
from inducekv_vllm.frontend.served_bundle import ServedBundle


def task_adapters(memory: ServedBundle) -> dict[str, LoRARequest]:
    """The adapter of each task. The prefix cache tells adapters apart by name."""
    return {
        record.task: LoRARequest(
            f"inducekv-{record.digest}", adapter_number(record.digest), str(adapter_folder(memory, record))
        )
        for record in memory.metadata.task_adapters
    }


def adapter_folder(memory: ServedBundle, record: AdapterRecord) -> Path:
    """The folder of a task's adapter; a relative path is relative to the bundle's folder."""
    return Path(memory.path).parent / record.path


def adapter_number(text: str) -> int:
    """Of an adapter, the same in every API process, and far from those that vLLM counts."""
    return (1 << 30) + int(hashlib.sha256(text.encode()).hexdigest()[:7], 16)
