"""Which worker serves on which platform, and what the GPU's worker takes from vLLM's configuration."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode

from inducekv_vllm import worker
from inducekv_vllm.attention.kernels import launch
from inducekv_vllm.attention.kernels.tiles import Processors
from inducekv_vllm.attention.pool import PoolShape
from inducekv_vllm.attention.request_table import MemoryOfRequests
from inducekv_vllm.bundle import EntryRecord
from inducekv_vllm.errors import CapacityError, UnsupportedModel
from inducekv_vllm.retrieval.page_terms import Retrieval, page_terms
from inducekv_vllm.workers.cpu import InduceKVCPUWorker
from inducekv_vllm.workers.cuda import InduceKVCUDAWorker
from inducekv_vllm.workers.memory_worker import check_most_entries
from inducekv_vllm.workers.query_keys import QueryKeyAccumulator
from inducekv_vllm.workers.resident import ResidentBundles
from tests.inducekv_vllm.attention.pools import CPU, fitting_bundle, poisoned_pool, store
from tests.inducekv_vllm.attention.test_kernel_memory import SHAPE
from tests.inducekv_vllm.bundles import random_gate


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
    facts = {"form": "decoupled", "weighting": "uniform", "activations": dict.fromkeys(tasks, "prompt")}
    gate = random_gate(bundle.metadata.backbone)
    gated = fitting_bundle(shape, 5, 4, entries=entries, gate=gate, recipe="refined", **facts)
    most = max(map(tasks.count, tasks))
    check_most_entries(bundle, 5)
    check_most_entries(gated, most)
    for own, read in ((bundle, 5), (gated, most)):
        with pytest.raises(CapacityError, match=f"may read {read} entries .* larger memory_request_entries"):
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
    of_gpu: Any = InduceKVCUDAWorker.__new__(InduceKVCUDAWorker)
    compilation = SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=sizes)
    vars(of_gpu).update(
        pool=poisoned_pool(SHAPE),
        memory_of_requests=MemoryOfRequests(2, lambda memory: None),
        model_config=SimpleNamespace(),
        vllm_config=SimpleNamespace(compilation_config=compilation),
        _device=CPU,
    )
    assert of_gpu.make_attention(2, 8)._most_graph_rows == rows


def test_a_step_does_not_wait_while_the_memory_of_its_last_request_is_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = PoolShape(entries=40, num_layers=1, num_kv_heads=1, heads_per_kv_head=1, head_size=8)
    serving: Any = InduceKVCPUWorker.__new__(InduceKVCPUWorker)
    model = SimpleNamespace(
        dtype=torch.float32,
        get_num_kv_heads=lambda _: 1,
        get_num_layers=lambda _: 1,
        get_num_attention_heads=lambda _: 1,
        get_head_size=lambda: 8,
    )
    scheduler = SimpleNamespace(max_num_seqs=2)
    vars(serving).update(
        vllm_config=SimpleNamespace(
            additional_config={"inducekv": {"memory_pool_entries": 40}}, scheduler_config=scheduler
        ),
        model_config=model,
        parallel_config=None,
        _device=CPU,
        query_keys=QueryKeyAccumulator(CPU),
        gate_passes=SimpleNamespace(finish=lambda ids: None, pending=0),
        resident=ResidentBundles(lambda path, digest: store(serving.pool, fitting_bundle(shape, 3, 2)), lambda: False),
    )
    serving._allocate_memory()
    may_erase, erase = threading.Event(), serving.pool._erase
    monkeypatch.setattr(serving.pool.ranges, "_erase", lambda place: (may_erase.wait(30), erase(place)))

    serving.inducekv_load_bundle("path", "digest")
    bundle = serving.resident._bundles["digest"].result(30)
    terms = page_terms(
        Retrieval(np.arange(2), np.full(2, 0.5, np.float32)), bundle.weighting, payload_tokens=2, num_entries=3
    )
    serving.memory_of_requests.start("a", "content", bundle, terms, 0)
    serving.inducekv_unload_bundle("digest")
    cached = SimpleNamespace(req_ids=[])
    serving._follow_schedule(
        SimpleNamespace(
            finished_req_ids={"a"}, preempted_req_ids=None, scheduled_new_reqs=[], scheduled_cached_reqs=cached
        )
    )
    assert not may_erase.is_set()
    assert serving.pool.keys.any()
    assert not serving.inducekv_is_erased("digest")
    may_erase.set()
    serving.resident.close()
    assert serving.inducekv_is_erased("digest")
    assert not serving.pool.keys.any()
    assert not serving.pool.values.any()
    stats = serving.inducekv_stats()
    assert stats["pool_tokens_free"] == stats["pool_tokens"]
