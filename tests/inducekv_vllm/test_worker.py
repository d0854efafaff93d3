"""Which worker serves on which platform, and what the GPU's worker takes from vLLM's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from inducekv_vllm import worker
from inducekv_vllm.attention.kernels import launch
from inducekv_vllm.attention.kernels.tiles import Processors
from inducekv_vllm.attention.request_table import MemoryOfRequests
from inducekv_vllm.attention.term_tables import TermTables
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.worker_cpu import InduceKVCPUWorker
from inducekv_vllm.worker_cuda import InduceKVCUDAWorker
from tests.inducekv_vllm.attention.pools import CPU, poisoned_pool
from tests.inducekv_vllm.attention.test_kernel_memory import SHAPE


@pytest.mark.parametrize(("platform", "kind"), [("cpu", InduceKVCPUWorker), ("cuda", InduceKVCUDAWorker)])
def test_each_platform_has_its_worker(platform: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "current_platform", fake(platform))
    assert worker.worker_class() is kind


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "current_platform", fake("rocm"))
    with pytest.raises(UnsupportedModel, match="serves on CPUs and NVIDIA GPUs, found rocm"):
        worker.worker_class()


def fake(name: str) -> Any:
    return SimpleNamespace(device_name=name, is_cpu=lambda: name == "cpu", is_cuda=lambda: name == "cuda")


@pytest.mark.parametrize(
    ("mode", "sizes", "rows"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, 16, 16),
        (CUDAGraphMode.FULL_DECODE_ONLY, 4, 4),
        (CUDAGraphMode.PIECEWISE, 16, 0),
        (CUDAGraphMode.NONE, None, 0),
    ],
)
def test_graph_buffers_are_as_large_as_the_largest_graph_with_attention(
    mode: CUDAGraphMode, sizes: int | None, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "processors", lambda device: Processors(count=2))
    tables = TermTables.allocate(2, SHAPE, CPU)
    of_gpu: Any = InduceKVCUDAWorker.__new__(InduceKVCUDAWorker)
    compilation = SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=sizes)
    vars(of_gpu).update(
        pool=poisoned_pool(SHAPE),
        memory_of_requests=MemoryOfRequests(2, tables),
        model_config=SimpleNamespace(),
        vllm_config=SimpleNamespace(compilation_config=compilation),
        _device=CPU,
    )
    assert of_gpu.make_attention(tables)._most_graph_rows == rows
