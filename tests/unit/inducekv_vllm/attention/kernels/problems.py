"""Steps for the kernels, with NaN in everything that must not be read, and their results by plain loops in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from inducekv_vllm.attention.kernels.layout import LayerPool, SlotTables, StepTensors
from inducekv_vllm.attention.kernels.tiles import LaunchShape, Processors, launch_shape, plan_tiles

Geometry = tuple[int, int, int] | tuple[int, int, int, int]  # H, J, D, and V if that is smaller
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}  # of the largest number
SCALE = 0.2


@dataclass(frozen=True)
class Memory:
    """What a slot reads. Terms are drawn at random where none are given."""

    tokens: int
    form: str = "merged"
    map_rows: int = 0
    entry_tokens: int = 1  # adjacent in the pool, with equal terms; so are the map rows of an entry
    map_rank: int = 1
    remainder: bool = False
    entries_of: int | None = None  # the number of an earlier memory that has the same entries
    adjacent: bool = False  # its tokens lie side by side with neutral terms, so these are not read
    key_scale: float | None = None
    log_weight: float | None = None
    value_scale: float | None = None


@dataclass(frozen=True, eq=False)
class Problem:
    pool: LayerPool
    tables: SlotTables
    row_slot: Tensor  # [R] int32
    query: Tensor  # [R, H, D]
    output: Tensor  # [R, H, V]
    self_lse: Tensor  # [R, H]

    @property
    def lengths(self) -> np.ndarray:
        return self.tables.length[self.row_slot.long()].cpu().numpy()

    @property
    def slots(self) -> np.ndarray:
        """[R]"""
        return self.row_slot.cpu().numpy()

    def shape(self, *, split: bool = False, lse: bool = True) -> LaunchShape:
        """A launch for this step; one that splits memories of any length if `split`."""
        _, H, D = self.query.shape
        J = self.pool.keys.shape[0]
        members = np.unique(self.slots[self.slots > 0], return_counts=True)[1]
        return launch_shape(
            rows=int(members.sum()),
            slots=len(members),
            largest_slot=int(members.max(initial=0)),
            longest=513 if split else 512,
            heads_per_kv_head=H // J,
            kv_heads=J,
            head_size=D,
            value_size=self.pool.values.shape[-1],
            element_size=self.query.element_size(),
            maps=self.pool.map_in is not None,
            lse=lse,
            processors=Processors(16),
        )

    def step(self, shape: LaunchShape) -> StepTensors:
        plan = plan_tiles(self.slots, self.lengths, shape)
        return StepTensors.from_plan(plan, len(self.pool.keys), self.row_slot.device)

    def to(self, device: str) -> Problem:
        def moved(tensors: LayerPool | SlotTables) -> dict[str, Tensor]:
            return {name: tensor.to(device) for name, tensor in vars(tensors).items() if isinstance(tensor, Tensor)}

        return replace(
            self,
            pool=LayerPool(**moved(self.pool)),
            tables=SlotTables(**moved(self.tables)),
            **{name: getattr(self, name).to(device) for name in ("row_slot", "query", "output", "self_lse")},
        )


def make(
    geometry: Geometry,
    memories: Sequence[Memory],
    row_memory: Sequence[int],
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    size: float = 1.0,
) -> Problem:
    """A step of R rows; row r has memory number `row_memory[r]`, counted from 1, or none if that is 0.

    Args:
        size: of keys and queries.
    """
    H, J, D, V = (*geometry, geometry[2])[:4]
    rng = torch.Generator().manual_seed(seed)
    R, N, G = len(row_memory), len(memories), H // J

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=rng) * size).to(dtype)

    tables = SlotTables.allocate(N, max(max(m.tokens for m in memories), 1) + 3, 9, "cpu")
    for name in ("log_weight", "key_scale", "value_scale", "map_weight"):
        getattr(tables, name).fill_(math.nan)
    m, r = max(memory.entry_tokens for memory in memories), max(memory.map_rank for memory in memories)
    pool_entries, pool_maps = 2 * sum(x.tokens for x in memories) + 5, 2 * sum(x.map_rows for x in memories) + 3
    beside = sum(x.tokens + 1 for x in memories if x.adjacent)
    keys, values = (torch.full((J, pool_entries * m + beside, size), math.nan, dtype=dtype) for size in (D, V))
    map_in, map_out = (torch.full((J, pool_maps * r, G * V), math.nan, dtype=dtype) for _ in range(2))
    free_tokens = iter((m * torch.randperm(pool_entries, generator=rng)).tolist())
    free_rows = iter((r * torch.randperm(pool_maps, generator=rng)).tolist())
    poisoned = next(free_tokens), next(free_rows)
    tables.token_index.fill_(poisoned[0])
    tables.map_index.fill_(poisoned[1])
    places, end = {}, pool_entries * m
    for slot, memory in enumerate(memories, start=1):
        S, M = memory.tokens // memory.entry_tokens, memory.map_rows // memory.map_rank  # entries
        if memory.entries_of is None:
            place = [next(free_tokens) for _ in range(S)]
            if memory.adjacent:
                place, end = [end + number * memory.entry_tokens for number in range(S)], end + memory.tokens + 1
            tokens, map_place = _all(place, memory.entry_tokens), [next(free_rows) for _ in range(M)]
            rows = _all(map_place, memory.map_rank)
            keys[:, tokens], values[:, tokens] = normal(J, len(tokens), D, size=size), normal(J, len(tokens), V)
            map_in[:, rows], map_out[:, rows] = (normal(J, len(rows), G * V, size=0.1) for _ in range(2))
            places[slot] = place, map_place
        else:
            places[slot] = places[memory.entries_of]
        place, map_place = places[slot]
        if memory.adjacent:
            tables.first_token[slot] = place[0]
        tables.map_index[slot, :M] = torch.tensor(map_place, dtype=torch.int32)
        alpha = torch.rand(S, generator=rng) + 0.1
        if not memory.adjacent:
            before = torch.arange(S, dtype=torch.int32) * memory.entry_tokens
            tables.token_index[slot, :S] = torch.tensor(place, dtype=torch.int32) - before
            _fill(tables.key_scale[slot, :S], memory.key_scale, alpha.sqrt())
            _fill(tables.value_scale[slot, :S], memory.value_scale, alpha.sqrt())
            _fill(tables.log_weight[slot, :S], memory.log_weight, alpha.log())
        tables.map_weight[slot, :M] = torch.rand(M, generator=rng)
        tables.length[slot], tables.map_length[slot] = memory.tokens, memory.map_rows
        tables.entry_tokens[slot], tables.map_rank[slot] = memory.entry_tokens, memory.map_rank
        tables.decoupled[slot] = int(memory.form == "decoupled")
        if memory.remainder:
            tables.log_remainder[slot] = 1.5
    value_gate, bias = torch.rand(N + 1, generator=rng) + 0.2, torch.randn(N + 1, generator=rng)
    fused = normal(R, H + 2 * J, D, size=size)  # as vLLM's, of which the query is a part
    query, output, self_lse = fused[:, :H], normal(R, H, V), torch.randn(H, R, generator=rng).T
    row_slot = torch.tensor(row_memory, dtype=torch.int32)
    query[row_slot == 0] = output[row_slot == 0] = math.nan
    self_lse[row_slot == 0] = math.nan
    maps = (map_in, map_out) if any(m.map_rows for m in memories) else ()
    pool = LayerPool(keys, values, value_gate, bias, *maps)
    return Problem(pool, tables, row_slot, query, output, self_lse)


def _all(first: Sequence[int], count: int) -> list[int]:
    """`count` adjacent places from each of the first ones on."""
    return [place + number for place in first for number in range(count)]


def _fill(terms: Tensor, given: float | None, drawn: Tensor) -> None:
    terms.copy_(drawn if given is None else torch.full_like(drawn, given))


def by_loops(problem: Problem, lse: bool = True) -> Tensor:
    """The output [R, H, V] in float64: one softmax for each row and head."""
    pool, tables = problem.pool, problem.tables
    expected = problem.output.double().clone()
    J = pool.keys.shape[0]
    _, H, V = expected.shape
    G = H // J
    for row, slot in enumerate(problem.row_slot.tolist()):
        if not slot:
            continue
        m, r = int(tables.entry_tokens[slot]), int(tables.map_rank[slot])
        k, maps = int(tables.length[slot]) // m, int(tables.map_length[slot]) // r  # entries
        index = tables.token_index[slot, :k].long().repeat_interleave(m) + torch.arange(k * m)  # [S]
        if (first := int(tables.first_token[slot])) >= 0:
            index = torch.arange(first, first + k * m)
        map_index = _all(tables.map_index[slot, :maps].tolist(), r)  # [M]
        terms = (tables.key_scale, tables.log_weight, tables.value_scale)
        key_scale, log_weight, value_scale = (x[slot, :k].double().repeat_interleave(m) for x in terms)  # [S]
        if first >= 0:
            key_scale, log_weight, value_scale = torch.ones(3, k * m, dtype=torch.float64) * torch.tensor(
                [[1], [0], [1]]
            )
        map_weight = tables.map_weight[slot, :maps].double().repeat_interleave(r)  # [M]
        value_gate, bias = float(pool.value_gate[slot]), float(pool.bias[slot])
        own = problem.output[row].double()  # [H, V]
        for head in range(H):
            keys, values = pool.keys[head // G, index].double(), pool.values[head // G, index].double()
            logits = key_scale * (keys @ problem.query[row, head].double()) * SCALE
            logits = logits + log_weight + bias  # [S]
            values = value_scale[:, None] * value_gate * values  # [S, V]
            zero = torch.zeros(1, V, dtype=torch.float64)
            if tables.decoupled[slot] or not lse:
                weights = torch.cat([logits, torch.zeros(1).double()]).softmax(0)
                expected[row, head] = own[head] + weights @ torch.cat([values, zero])
            else:
                rest = (tables.log_remainder[slot].double() + bias)[None]
                weights = torch.cat([logits, rest, problem.self_lse[row, head].double()[None]]).softmax(0)
                expected[row, head] = weights @ torch.cat([values, zero, own[head][None]])
        for j in range(J if maps else 0):
            assert pool.map_in is not None
            assert pool.map_out is not None
            vector = own[j * G : (j + 1) * G].reshape(-1)
            for place, weight in zip(map_index, map_weight, strict=True):
                inner = pool.map_in[j, place].double() @ vector
                added = value_gate * weight * inner * pool.map_out[j, place].double()
                expected[row, j * G : (j + 1) * G] += added.view(G, V)
    return expected


def deviation(found: Tensor, expected: Tensor, rows: Tensor) -> float:
    """The largest difference in the rows [R] bool, of the largest number in them."""
    found, expected = found.double()[rows].cpu(), expected.double()[rows].cpu()
    return float((found - expected).abs().max() / expected.abs().max())


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal to the bit, NaN included."""
    whole = torch.int32 if found.element_size() == 4 else torch.int16
    return torch.equal(found.contiguous().view(whole), expected.contiguous().view(whole))
