"""A step with memory: its tensors, its bytes and its operations. Shapes: see `inducekv_vllm.attention.kernels`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.geometries import Geometry
from benchmarks.kernels import twin
from inducekv_vllm.attention.kernels import launch
from inducekv_vllm.attention.kernels.geometry import KernelGeometry, MemoryRows
from inducekv_vllm.attention.kernels.layout import LayerPool, SlotTables, StepTensors
from inducekv_vllm.attention.kernels.tiles import IntArray, LaunchShape, Processors, StepPlan, plan_tiles

PAYLOAD_TOKENS = 8  # m
POOL_TOKENS = 512 * PAYLOAD_TOKENS  # the engine's default
LEAST_MAP_COLUMNS = 16  # as the engine's tables have at least, so that the kernels are the same
FLOAT32_BYTES, INDEX_BYTES = 4, 4
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}  # of the largest number, as in the tests
# Without a GPU, tiles are planned as for a small one, so that the plans have work to share out.
IMAGINED = Processors(16)

Phase = Literal["decode", "prefill"]
Form = Literal["merged", "decoupled"]
FORMS: tuple[Form, ...] = ("merged", "decoupled")


@dataclass(frozen=True)
class Case:
    """`rows` rows with memory of B entries: one request's prompt, or one row each of as many requests.

    Decoupled memory is as it is trained: all requests read its entries, adjacent and with neutral terms. Of merged
    memory each request has retrieved its own weights, and its entries lie anywhere.
    """

    phase: Phase
    rows: int  # R
    entries: int  # B
    form: Form
    map_rows: int = 0
    page_sets: int = 1  # different memories, each of B entries, that the requests of a decode step share out

    @property
    def tokens(self) -> int:
        """S"""
        return self.entries * PAYLOAD_TOKENS

    @property
    def name(self) -> str:
        sets = f", {self.page_sets} memories" if self.page_sets > 1 else ""
        maps = f", {self.map_rows} map rows" if self.map_rows else ""
        return f"{self.phase} {self.rows}, B = {self.entries}{sets}, {self.form}{maps}"

    @property
    def is_trained(self) -> bool:
        return self.form == "decoupled"

    @property
    def requests(self) -> int:
        return self.rows if self.phase == "decode" else 1

    @property
    def sets(self) -> int:
        return min(self.page_sets, self.requests)

    @property
    def slots(self) -> int:
        return self.sets if self.is_trained else self.requests

    @property
    def slot_of_request(self) -> IntArray:
        """[requests], counted from 1."""
        return np.arange(self.requests, dtype=np.int32) % self.slots + 1

    @property
    def set_of_slot(self) -> IntArray:
        """[slots], the number of its memory."""
        return np.arange(self.slots, dtype=np.int32) % self.sets

    @property
    def memory_rows(self) -> MemoryRows:
        """As the engine describes the step."""
        slots = np.resize(self.slot_of_request, self.rows)
        tokens = np.full(self.rows, self.tokens, dtype=np.int32)
        return MemoryRows(slots, tokens, maps=self.map_rows > 0, merged=self.form == "merged", layers=frozenset({0}))


@dataclass(frozen=True, eq=False)
class Workload:
    """The tensors of a case, for several layers that share a step's tables and plan."""

    case: Case
    geometry: Geometry
    shape: LaunchShape
    tables: SlotTables
    step: StepTensors
    pools: list[LayerPool]
    query: Tensor  # [R, H, D]
    self_output: Tensor  # [R, H, V]
    self_lse: Tensor | None  # [R, H] float32, if the launch may be for merged memory

    def add_memory(self, output: Tensor, layer: int = 0) -> None:
        launch.add_memory(self.pools[layer], self.tables, self.step, self.query, output, *self._rest())

    def with_lse(self, lse: Tensor) -> Workload:
        """The same step behind a self-attention of log-sum-exp [R, H], which not every launch takes."""
        return replace(self, self_lse=lse if self.shape.lse else None)

    def by_twin(self, layer: int = 0) -> Tensor:
        """The output in float32, which is not rounded to the kernels' precision."""
        output = self.self_output.to(torch.float32, copy=True)
        twin.add_memory(self.pools[layer], self.tables, self.step, self.query, output, *self._rest())
        return output

    def _rest(self) -> tuple[Tensor | None, float, LaunchShape]:
        return self.self_lse, self.geometry.scale, self.shape

    @property
    def bytes(self) -> int:
        """What a call must move at least: each page, row and term once."""
        case, g = self.case, self.geometry
        size = self.query.element_size()
        slots, sets = case.slots, case.sets
        pages = sets * g.kv_heads * case.tokens * g.head_size * 2 * size
        maps = sets * case.map_rows * g.heads * g.head_size * 2 * size
        tokens = 0 if case.is_trained else case.tokens  # whose terms and places are read
        terms = slots * (tokens * 3 + case.map_rows) * FLOAT32_BYTES
        indices = slots * (tokens + case.map_rows) * INDEX_BYTES
        rows = case.rows * g.heads * (3 * g.head_size * size + (FLOAT32_BYTES if case.form == "merged" else 0))
        return pages + maps + terms + indices + rows

    @property
    def operations(self) -> int:
        """Multiplications and additions of the matrix products."""
        case, g = self.case, self.geometry
        return 4 * case.rows * g.heads * g.head_size * (case.tokens + case.map_rows)


def plan_of(
    case: Case, geometry: Geometry, dtype: torch.dtype, processors: Processors, in_graph: bool = True
) -> tuple[LaunchShape, StepPlan]:
    """What the engine launches beside FlashAttention: in decode what graphs do, in prefill what the step needs.

    Args:
        in_graph: False: decode is a launch of the step alone, too, as without graphs.
    """
    engine = KernelGeometry(
        kv_heads=geometry.kv_heads,
        heads_per_kv_head=geometry.heads_per_kv_head,
        head_size=geometry.head_size,
        value_size=geometry.value_size,
        element_size=dtype.itemsize,
        most_tokens=max(POOL_TOKENS, case.tokens),
        processors=processors,
    )
    rows = case.memory_rows
    is_graph = case.phase == "decode" and in_graph
    if not is_graph:
        shape = engine.of_step(rows)
    elif rows.maps or rows.merged:
        shape = engine.of_graph(case.rows, maps=engine.has_maps, lse=engine.has_maps)
    else:
        shape = engine.of_graph(case.rows, maps=False, lse=False)
    return shape, plan_tiles(rows.slots, rows.lengths, shape)


def build(
    case: Case,
    geometry: Geometry,
    dtype: torch.dtype,
    device: str,
    layers: int = 1,
    seed: int = 0,
    processors: Processors | None = None,
    in_graph: bool = True,
) -> Workload:
    """Random tensors for a case, with the engine's launch.

    Args:
        layers: how many pools.
        processors: to plan for; those of the device by default.
        in_graph: see `plan_of`.
    """
    g, rng = geometry, torch.Generator(device).manual_seed(seed)
    if processors is None:
        processors = launch.processors(torch.device(device)) if device == "cuda" else IMAGINED
    shape, plan = plan_of(case, g, dtype, processors, in_graph)
    slots, S, M, sets = case.slots, case.tokens, case.map_rows, case.sets
    tables = SlotTables.allocate(slots, S, max(M, LEAST_MAP_COLUMNS), device)
    set_of_slot = torch.from_numpy(case.set_of_slot).long().to(device)
    if case.is_trained:
        place = torch.arange(sets * case.entries, device=device)
        tables.first_token[1:] = set_of_slot * S
    else:
        place = torch.randperm(sets * case.entries, generator=rng, device=device)  # pages lie anywhere in the pool
        alpha = torch.rand(slots, S, generator=rng, device=device) + 0.1
        tables.log_weight[1:] = (alpha / alpha.sum(1, keepdim=True)).log()
    tokens = place[:, None] * PAYLOAD_TOKENS + torch.arange(PAYLOAD_TOKENS, device=device)
    tables.token_index[1:] = (tokens.view(sets, S)[set_of_slot] - torch.arange(S, device=device)).int()
    tables.key_scale[1:] = tables.value_scale[1:] = 1.0
    tables.length[1:] = S
    tables.decoupled[1:] = int(case.form == "decoupled")
    if M:
        tables.map_index[1:, :M] = torch.arange(sets * M, device=device).view(sets, M)[set_of_slot].int()
        tables.map_weight[1:, :M] = 1.0
        tables.map_length[1:] = M

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=rng, device=device, dtype=torch.float32) * size).to(dtype)

    def pool() -> LayerPool:
        pages = (normal(g.kv_heads, sets * S, size) for size in (g.head_size, g.value_size))
        width = g.heads_per_kv_head * g.value_size
        maps = (normal(g.kv_heads, max(sets * M, 1), width, size=0.05) for _ in range(2)) if shape.maps else ()
        columns = (torch.full((slots + 1,), value, device=device) for value in (0.5, -0.2))
        return LayerPool(*pages, *columns, *maps)

    lse = torch.randn(g.heads, case.rows, generator=rng, device=device).T if shape.lse else None
    workload = Workload(
        case=case,
        geometry=g,
        shape=shape,
        tables=tables,
        step=StepTensors.from_plan(plan, g.kv_heads, device),
        pools=[pool() for _ in range(layers)],
        query=normal(case.rows, g.heads, g.head_size),
        self_output=normal(case.rows, g.heads, g.value_size),
        self_lse=lse,
    )
    launch.check(workload.pools[0], g.heads)
    return workload


def with_sqrt_weighting(workload: Workload, alpha: Tensor) -> Workload:
    """The same with the paper's weighting: alpha [slots, S] enters keys and values."""
    tables = workload.tables.copy()
    tables.log_weight.zero_()
    tables.key_scale[1:] = tables.value_scale[1:] = alpha.sqrt()
    tables.first_token.fill_(-1)
    return replace(workload, tables=tables)


def deviation(found: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest number."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
