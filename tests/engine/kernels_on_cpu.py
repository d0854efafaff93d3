"""The GPU worker's memory attention in a CPU worker: kernels in Triton's interpreter, FlashAttention in plain torch.

Both classes are for `--worker-cls`. Steps that only generate are served as CUDA graphs would serve them: by what was
recorded before, for more rows than the step has, from buffers that the step fills.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from benchmarks.kernels import twin
from inducekv_vllm.attention.cpu_ops import packed_values
from inducekv_vllm.attention.kernel_memory import KernelMemoryAttention
from inducekv_vllm.attention.kernel_step import GraphKind, StepLaunch
from inducekv_vllm.attention.kernel_tables import KernelTables
from inducekv_vllm.attention.kernels import launch
from inducekv_vllm.attention.kernels.layout import LayerPool, SlotTables, StepTensors
from inducekv_vllm.attention.kernels.tiles import LaunchShape, Processors
from inducekv_vllm.attention.memory_attention import MemoryAttention
from inducekv_vllm.attention.slots import ActingRows
from inducekv_vllm.plugin import FLASH_BACKEND
from inducekv_vllm.vllm_seams.runner import StepRows
from inducekv_vllm.workers.answering import AnswerOnDevice
from inducekv_vllm.workers.cuda import InduceKVCUDAWorker
from tests.engine.interpreter import hasten

GRAPH_ROWS = (4, 8, 16)  # sizes of the graphs that are imitated


class KernelsAroundCPUAttention(InduceKVCUDAWorker, CPUWorker):
    """vLLM's own CPU attention: it keeps no log-sum-exp, so only decoupled memory can be served."""

    has_cpu_cache = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        hasten()
        count_processed()
        super().__init__(*args, **kwargs)

    def make_attention(self, num_slots: int, most_entries: int) -> MemoryAttention:
        return (KernelsBesideCPUCache if self.has_cpu_cache else ReplayedKernels)(
            self.pool,
            KernelTables(num_slots, most_entries, self.pool.shape.num_layers, self._device),
            self._device,
            self.model_config,
            Processors(count=2),
            most_graph_rows=GRAPH_ROWS[-1],
            most_memories=self.settings.most_memories,
            kernels=SimpleNamespace(add_memory=some_by_kernels),
        )

    @property
    def _most_graph_rows(self) -> int:
        """No graph is captured."""
        return 0

    def inducekv_calls(self) -> dict[str, Any]:
        """How often each way to add memory was called; the kernels by test."""
        return {**CALLS, "kernels": {test: len(steps) for test, steps in STEPS_BY_KERNELS.items() if steps}}


class KernelsAroundFlashAttention(KernelsAroundCPUAttention):
    """InduceKV's FlashAttention backend, whose functions are those below."""

    has_cpu_cache = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        vars(flash_attn).update(
            get_flash_attn_version=lambda **_: 2,
            flash_attn_varlen_func=attend,
            reshape_and_cache_flash=cache,
            get_scheduler_metadata=lambda **_: None,
        )
        register_backend(AttentionBackendEnum.CPU_ATTN, FLASH_BACKEND)
        super().__init__(*args, **kwargs)


CALLS = dict.fromkeys(("twin", "graphs", "lse", "processed"), 0)
KERNEL_CALLS = 4  # of each test; the interpreter takes up to a second for each
STEPS_BY_KERNELS: dict[str, set[Any]] = {}  # by test
LAYERS: list[int] = []


def count_processed() -> None:
    """Count the steps in which the V2 runner calls logits processors."""

    def counted(self: AnswerOnDevice, logits: Tensor, ctx: Any) -> Tensor:
        CALLS["processed"] += 1
        return apply(self, logits, ctx)

    apply = AnswerOnDevice.apply
    AnswerOnDevice.apply = counted  # type: ignore[method-assign]


def some_by_kernels(
    pool: LayerPool,
    tables: SlotTables,
    step: StepTensors,
    query: Tensor,
    output: Tensor,
    self_lse: Tensor | None,
    scale: float,
    shape: LaunchShape,
) -> None:
    """`launch.add_memory` in one layer of the first step of each kind of a test, up to a number; otherwise its twin.

    The layer is another one each time.
    """
    if (layer := pool.keys.data_ptr()) not in LAYERS:
        LAYERS.append(layer)
    CALLS["lse"] += self_lse is not None
    steps = STEPS_BY_KERNELS.setdefault(os.environ.get("PYTEST_CURRENT_TEST", ""), set())
    slots = step.tile_slot[[tile for tile, _ in twin.live_tiles(step)]]
    forms = tuple(tables.decoupled[slots].unique().tolist())
    kind = shape.kind, len(query), forms
    is_idle = not len(slots)  # when kernels are warmed
    in_turn = LAYERS.index(layer) == len(steps) % len(LAYERS)
    if is_idle or kind in steps or len(steps) == KERNEL_CALLS or not in_turn:
        CALLS["twin"] += 1
        twin.add_memory(pool, tables, step, query, output, self_lse, scale, shape)
    else:
        steps.add(kind)
        launch.add_memory(pool, tables, step, query, output, self_lse, scale, shape)


class ReplayedKernels(KernelMemoryAttention):
    _graph_rows: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, choose_graphs=self._choose, **kwargs)

    def begin_step(self, rows: StepRows, acting: Sequence[ActingRows]) -> None:
        if set(rows.num_scheduled) == {1}:
            self._graph_rows = min(size for size in GRAPH_ROWS if size >= len(rows.request_ids))
            rows = replace(rows, graph_rows=self._graph_rows)
        super().begin_step(rows, acting)

    def end_step(self) -> None:
        super().end_step()
        self._graph_rows = None

    def _launch(self, num_rows: int) -> StepLaunch | None:
        if self._graph_rows is None:
            return super()._launch(num_rows)
        return None if self._chosen == GraphKind.NONE else self._graphs.launch(self._graph_rows, self._chosen)

    def _launches_in(self, layer: int) -> bool:
        if self._graph_rows is None:
            return super()._launches_in(layer)
        return self._chosen != GraphKind.FEW or layer in self._few

    def _launch_behind(self, num_rows: int) -> StepLaunch | None:
        if self._graph_rows is None:
            return super()._launch_behind(num_rows)
        is_there = self._graphs_behind is not None and self._chosen == GraphKind.TWO
        return self._graphs_behind.launch(self._graph_rows, self._chosen) if is_there else None  # type: ignore[union-attr]

    def _choose(self, kind: GraphKind) -> None:
        """As the graphs of this kind were captured."""
        self._chosen = kind
        CALLS["graphs"] += kind != GraphKind.NONE


class KernelsBesideCPUCache(ReplayedKernels):
    def cached_values(self, kv_cache: Tensor) -> Tensor:
        return packed_values(kv_cache)


def attend(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor,
    return_softmax_lse: bool = False,
    **_: Any,
) -> Any:
    """FlashAttention over a paged cache: q [R, H, D], k and v [blocks, C, J, D]; the log-sum-exp is [H, R]."""
    assert causal
    R, H, _ = q.shape  # type: ignore[assignment]
    lse = torch.full((H, R), math.nan)
    for request, (begin, end) in enumerate(zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:], strict=False)):
        length, C = int(seqused_k[request]), k.shape[1]
        if begin == end or length == 0:
            continue
        blocks = block_table[request, : -(-length // C)].long()
        keys, values = (
            x[blocks].flatten(0, 1)[:length].repeat_interleave(H // x.shape[2], dim=1).float() for x in (k, v)
        )  # [T, H, D]
        logits = torch.einsum("rhd,thd->hrt", q[begin:end].float(), keys) * softmax_scale
        last = torch.arange(length - (end - begin), length)  # the last token that each row sees
        logits.masked_fill_(torch.arange(length) > last[:, None], -math.inf)
        lse[:, begin:end] = logits.logsumexp(-1)
        out[begin:end] = torch.einsum("hrt,thd->rhd", logits.softmax(-1), values).to(out.dtype)
    return (out, lse) if return_softmax_lse else out


def cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, *_: Any) -> None:
    """Write key and value [rows, J, D] to their slots of the caches [blocks, C, J, D]; a slot of -1 is padding."""
    C, rows = key_cache.shape[1], torch.nonzero(slots >= 0)[:, 0]
    block, offset = slots[rows] // C, slots[rows] % C
    key_cache[block, offset], value_cache[block, offset] = key[rows], value[rows]
