"""Which worker serves on which platform, and what the GPU's worker takes from vLLM's configuration."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.v1.worker.cpu_worker import CPUWorker

from inducekv_vllm import worker
from inducekv_vllm.attention.kernel_step import GraphKind
from inducekv_vllm.attention.kernels import launch
from inducekv_vllm.attention.kernels.tiles import Processors
from inducekv_vllm.attention.pool import PoolShape
from inducekv_vllm.bundle import EntryRecord
from inducekv_vllm.errors import CapacityError, UnsupportedModel
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from inducekv_vllm.workers.cpu import InduceKVCPUWorker
from inducekv_vllm.workers.cuda import InduceKVCUDAWorker
from inducekv_vllm.workers.refusals import check_most_entries
from inducekv_vllm.workers.steps import PIECE_S, Steps
from tests.bundles import random_gate
from tests.unit.inducekv_vllm.attention.pools import CPU, fitting_bundle, full_attention, poisoned_pool

SHAPE = PoolShape(entries=24, num_layers=2, num_kv_heads=2, heads_per_kv_head=3, head_size=16, value_size=16)


def test_each_platform_has_its_worker_and_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def worker_of(name: str) -> type:
        platform = SimpleNamespace(device_name=name, is_cpu=lambda: name == "cpu", is_cuda=lambda: name == "cuda")
        monkeypatch.setattr(worker, "current_platform", platform)
        return worker.worker_class()

    assert worker_of("cpu") is InduceKVCPUWorker
    assert worker_of("cuda") is InduceKVCUDAWorker
    with pytest.raises(UnsupportedModel, match="serves on CPUs and NVIDIA GPUs, found rocm"):
        worker_of("rocm")


@pytest.mark.parametrize("tasks", ["aabbb", "abbbb"])
def test_a_bundle_of_which_a_request_may_read_more_than_a_slot_holds_is_refused(tasks: str) -> None:
    """All entries, or those of one task behind a gate."""
    entries = tuple(EntryRecord(id=str(i), task=task, source_digest="ab") for i, task in enumerate(tasks))
    shape = replace(SHAPE, num_layers=3)
    bundle = fitting_bundle(shape, 5, 4, entries=entries)
    fields = {"form": "decoupled", "weighting": "uniform", "activations": dict.fromkeys(tasks, "prompt")}
    gate = random_gate(bundle.metadata.backbone)
    gated = fitting_bundle(shape, 5, 4, entries=entries, gate=gate, recipe="refined", **fields)
    most = max(map(tasks.count, tasks))
    check_most_entries(bundle, 5)
    check_most_entries(gated, most)
    for own, read in ((bundle, 5), (gated, most)):
        with pytest.raises(CapacityError, match=f"may read {read} entries .* as many as the pool has"):
            check_most_entries(own, read - 1)


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
    assert attention_of_gpu(SHAPE, 896, mode, sizes)._most_graph_rows == rows


@pytest.mark.parametrize(("num_layers", "hidden_size", "few"), [(24, 896, 8), (24, 576, 0), (23, 896, 0)])
def test_graphs_for_memory_in_few_layers_are_those_of_wide_and_deep_models(
    num_layers: int, hidden_size: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "processors", lambda device: Processors(count=2))
    shape = replace(SHAPE, num_layers=num_layers)
    attention = attention_of_gpu(shape, hidden_size, CUDAGraphMode.FULL_DECODE_ONLY, 4)
    assert len(attention._few) == few
    attention.attach(full_attention(), {}, [])
    assert (GraphKind.FEW in attention.graph_kinds) == (few > 0)


def attention_of_gpu(shape: PoolShape, hidden_size: int, mode: CUDAGraphMode, sizes: int | None) -> Any:
    of_gpu: Any = InduceKVCUDAWorker.__new__(InduceKVCUDAWorker)
    compilation = SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=sizes)
    vars(of_gpu).update(
        pool=poisoned_pool(shape),
        model_config=SimpleNamespace(
            get_hidden_size=lambda: hidden_size, use_mla=False, is_mm_prefix_lm=False, rswa_window=None
        ),
        settings=InduceKVConfig(),
        vllm_config=SimpleNamespace(compilation_config=compilation),
        _device=CPU,
    )
    return of_gpu.make_attention(2, 8)


@pytest.mark.parametrize("is_sampled", [True, False])
def test_loads_let_a_step_go_first_until_its_tokens_are_there(
    is_sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inducekv_vllm.workers.steps.LONGEST_REST_S", 0.0)
    stepping: Any = InduceKVCPUWorker.__new__(InduceKVCPUWorker)
    seen: list[float] = []

    def run(worker: InduceKVCPUWorker, _: object) -> object:
        seen.append(worker.steps.go_first())
        return None if is_sampled else "output"

    monkeypatch.setattr(CPUWorker, "execute_model", run)
    monkeypatch.setattr(CPUWorker, "sample_tokens", run, raising=False)
    nothing = SimpleNamespace(follow=lambda *_: None, end_step=lambda: None, attached=lambda output: output)
    vars(stepping).update(_device=CPU, requests=nothing, attention=nothing, decisions=nothing, _runner=None, _rows=None)
    stepping.steps = Steps()
    stepping.execute_model(None)
    seen.append(stepping.steps.go_first())
    if is_sampled:
        stepping.sample_tokens(None)
        seen.append(stepping.steps.go_first())
    assert seen == ([PIECE_S, PIECE_S, PIECE_S, 0.0] if is_sampled else [PIECE_S, 0.0])
