"""A pool with bundles of both forms, memories of them, and the GPU worker's memory attention around their steps."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import twin
from inducekv_vllm.attention.decoupled import ActiveRows, DecoupledStep
from inducekv_vllm.attention.kernel_memory import KernelMemoryAttention
from inducekv_vllm.attention.kernel_step import GraphKind
from inducekv_vllm.attention.kernel_tables import KernelTables
from inducekv_vllm.attention.kernels.tiles import Processors
from inducekv_vllm.attention.merged.cpu import prefill_memory_attention
from inducekv_vllm.attention.merged.merge import merge_memory
from inducekv_vllm.attention.pool import PoolShape
from inducekv_vllm.attention.slots import RequestMemory
from inducekv_vllm.vllm_seams.device import Device
from inducekv_vllm.vllm_seams.runner import StepRows
from inducekv_vllm.workers.requests import acting_rows
from tests.unit.inducekv_vllm.attention.pools import (
    CPU,
    fitting_bundle,
    poisoned_pool,
    random_memory,
    store,
)

SHAPE = PoolShape(entries=24, num_layers=2, num_kv_heads=2, heads_per_kv_head=3, head_size=16, value_size=16)
J, H, D = 2, 6, 16
SCALE = D**-0.5
MOST = 8  # rows of the largest graph
Step = list[tuple[int | None, int, int, int]]  # of each request: its memory, first active, computed, scheduled


class World:
    """A pool with a merged bundle and a decoupled one with maps, four memories of them, and the kernels' step."""

    def __init__(
        self, add_memory: Any = twin.add_memory, map_rank: int = 2, device: Device = CPU, **changes: Any
    ) -> None:
        self.pool = poisoned_pool(SHAPE)
        self.tables = KernelTables(6, 6, SHAPE.num_layers, device)
        merged = store(self.pool, fitting_bundle(SHAPE, 6, 4, seed=1))
        fields: Any = {"form": "decoupled", "weighting": "prior", "activations": {"t": "prompt"}}
        decoupled = store(self.pool, fitting_bundle(SHAPE, 6, 4, seed=2, map_rank=map_rank, **fields))
        memories = [(merged, 3, True), (decoupled, 4, False), (decoupled, 6, False), (decoupled, 6, False)]
        self.memories = [
            random_memory(bundle, top_k, remainder, seed=slot, slot=slot)
            for slot, (bundle, top_k, remainder) in enumerate(memories, start=1)
        ]
        for memory in self.memories:
            self.tables.write(memory)
        self.calls: list[Any] = []
        self.chosen: list[GraphKind] = []

        def record(*arguments: Any) -> None:
            self.calls.append(arguments)
            add_memory(*arguments)

        arguments = {"processors": Processors(count=2), "most_graph_rows": MOST} | changes
        model: Any = SimpleNamespace(use_mla=False, is_mm_prefix_lm=False, rswa_window=None)
        kernels = SimpleNamespace(add_memory=record)
        self.attention = KernelMemoryAttention(
            self.pool, self.tables, device, model, choose_graphs=self.chosen.append, kernels=kernels, **arguments
        )

    def begin(self, step: Step, graph_rows: int | None = None) -> None:
        """Begin a step whose requests have these memories."""
        rows = rows_of(step, graph_rows)
        self.attention.begin_step(rows, acting_rows(requests_of(self.memories, step), rows))

    def forward(self, query: Tensor, own: Tensor, lse: Tensor | None) -> Tensor:
        """What the second layer makes of the output of self-attention."""
        output = own.clone()
        assert self.attention.needs_lse(len(query)) <= (lse is not None)
        self.attention.add(1, query, output, lse if self.attention.needs_lse(len(query)) else None, SCALE)
        return output

    def expected(self, step: Step, query: Tensor, own: Tensor, lse: Tensor) -> Tensor:
        """Row by row, as on a CPU: through the memories, not through the tables."""
        result, layer, row = own.clone(), 1, 0
        for number, start, computed, scheduled in step:
            for position in range(computed, computed + scheduled):
                here, row = slice(row, row + 1), row + 1
                if number is None or position < start:
                    continue
                memory, stored = self.memories[number], self.memories[number].bundle.layers[layer]
                if memory.bundle.form == "decoupled":
                    DecoupledStep([ActiveRows(here, memory)]).add(layer, query, result, None, SCALE)
                else:
                    read = prefill_memory_attention(query[here], stored, memory, SCALE)
                    numbers = stored.value_gate, stored.bias, memory.log_remainder
                    result[here] = merge_memory(own[here], lse[here], *read, *numbers)
        return result


def requests_of(memories: list[RequestMemory], step: Step) -> dict[str, Any]:
    """By id; those without memory are left out."""
    return {
        str(number): SimpleNamespace(
            memories=[SimpleNamespace(slot=memories[memory], injection=SimpleNamespace(first_active=first_active))]
        )
        for number, (memory, first_active, *_) in enumerate(step)
        if memory is not None
    }


def rows_of(step: Step, graph_rows: int | None = None) -> StepRows:
    _, _, computed, scheduled = zip(*step, strict=True)
    return StepRows([str(number) for number in range(len(step))], computed, scheduled, graph_rows)


def tensors(rows: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and outputs [rows, H, D], and log-sum-exps [rows, H]."""
    generator = torch.Generator().manual_seed(seed)
    query, own = (torch.randn(rows, H, D, generator=generator) for _ in range(2))
    return query, own, torch.randn(rows, H, generator=generator)
