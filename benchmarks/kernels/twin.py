"""The kernels in plain PyTorch, tile by tile, for any device. Same arguments, same results.

Shapes: see `inducekv_vllm.attention.kernels`.

Letters here: n rows of a tile, s tokens that are read, k map rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from inducekv_vllm.attention.kernels.layout import LayerPool, SlotTables, StepTensors
from inducekv_vllm.attention.kernels.tiles import LaunchShape

Partial = tuple[Tensor, Tensor, Tensor]  # largest logit [n, H], sum of exp(logit - largest) [n, H], values [n, H, V]


def add_memory(
    pool: LayerPool,
    tables: SlotTables,
    step: StepTensors,
    query: Tensor,
    output: Tensor,
    self_lse: Tensor | None,
    scale: float,
    shape: LaunchShape,
) -> None:
    """`launch.add_memory`; it reads the plan on the host."""
    for tile, rows in live_tiles(step):
        slot = int(step.tile_slot[tile])
        parts = [attend(pool, tables, slot, query[rows], scale, *item) for item in items_of(tile, slot, tables, step)]
        merged = parts[0] if len(parts) == 1 else merge(parts)
        lse = None if self_lse is None or not shape.lse else self_lse[rows]
        result = finish(pool, tables, slot, merged, output[rows], lse).to(output.dtype)
        output[rows] = torch.where(result.isfinite(), result, output[rows])


def live_tiles(step: StepTensors) -> list[tuple[int, Tensor]]:
    """Every tile that is not idle, with its rows [n]."""
    live = int(step.count)
    if step.work.numel():
        live = int(step.work[:live, 0].amax()) + 1 if live else 0
    return [(number, rows[rows >= 0]) for number, rows in enumerate(step.tile_rows[:live].long())]


def items_of(tile: int, slot: int, tables: SlotTables, step: StepTensors) -> list[tuple[int, int]]:
    """The ranges of tokens that a tile's programs read."""
    if not step.work.numel():
        return [(0, int(tables.length[slot]))]
    first, end = step.tile_work[tile : tile + 2].tolist()
    return [(begin, stop) for _, begin, stop, _ in step.work[first:end].tolist()]


def attend(
    pool: LayerPool, tables: SlotTables, slot: int, query: Tensor, scale: float, begin: int, end: int
) -> Partial:
    """Read tokens `begin` to `end` of a slot's memory for query [n, H, D]."""
    n, H, D = query.shape
    J = pool.keys.shape[0]
    token, first = torch.arange(begin, end, device=query.device), int(tables.first_token[slot])
    m = tables.entry_tokens[slot]
    entry = token // m  # [s]
    terms = (tables.key_scale, tables.log_weight, tables.value_scale)
    key_scale, log_weight, value_scale = (table[slot, entry] for table in terms)  # [s]
    place = tables.token_index[slot, entry] + token  # [s]
    if first >= 0:
        place, key_scale, log_weight = first + token, torch.ones_like(key_scale), torch.zeros_like(log_weight)
        value_scale = key_scale
    keys, values = pool.keys[:, place].float(), pool.values[:, place].float()  # [J, s, D] and [J, s, V]
    grouped = query.float().view(n, J, H // J, D)
    logits = torch.einsum("njgd,jsd->njgs", grouped, keys) * scale * key_scale + log_weight
    largest = logits.amax(-1) if end > begin else logits.new_full((n, J, H // J), -torch.inf)
    weights = (logits - _finite(largest)[..., None]).exp()  # [n, J, G, s]
    read = torch.einsum("njgs,jsd->njgd", weights * value_scale, values)
    return largest.reshape(n, H), weights.sum(-1).reshape(n, H), read.reshape(n, H, -1)


def merge(parts: list[Partial]) -> Partial:
    """What one program would have read."""
    every = torch.stack([largest for largest, _, _ in parts])  # [parts, n, H]
    largest = every.amax(0)
    weight = (every - _finite(largest)).exp()
    total = (torch.stack([total for _, total, _ in parts]) * weight).sum(0)
    return largest, total, (torch.stack([read for _, _, read in parts]) * weight[..., None]).sum(0)


def finish(
    pool: LayerPool, tables: SlotTables, slot: int, memory: Partial, own: Tensor, self_lse: Tensor | None
) -> Tensor:
    """Merge memory with the output of self-attention own [n, H, V] and add the maps: [n, H, V] float32."""
    largest, total, read = memory
    bias, value_gate = pool.bias[slot], pool.value_gate[slot]
    largest = largest + bias
    remainder = tables.log_remainder[slot] + bias
    is_merged = self_lse is not None and not bool(tables.decoupled[slot])
    # The logit of what is not memory: self-attention's log-sum-exp, or that of decoupled memory's null token.
    other = self_lse if self_lse is not None and is_merged else torch.zeros_like(largest)
    top = torch.maximum(torch.maximum(largest, remainder), other)
    whole = total * (largest - top).exp() + (remainder - top).exp() + (other - top).exp()
    keep = (other - top).exp() / whole if is_merged else torch.ones_like(whole)
    result = keep[..., None] * own.float() + (value_gate * (largest - top).exp() / whole)[..., None] * read
    if pool.map_in is not None:
        result = result + value_gate * mapped(pool, tables, slot, own)
    return result


def mapped(pool: LayerPool, tables: SlotTables, slot: int, own: Tensor) -> Tensor:
    """What the maps make of the output of self-attention own [n, H, V], before the value gate: [n, H, V]."""
    assert pool.map_in is not None
    assert pool.map_out is not None
    n, H, V = own.shape
    J = pool.map_in.shape[0]
    row, rank = torch.arange(int(tables.map_length[slot]), device=own.device), tables.map_rank[slot]
    entry = row // rank  # [k]
    place = tables.map_index[slot, entry] + row % rank  # [k]
    blocks = own.float().view(n, J, H // J * V)
    inner = torch.einsum("njw,jkw->njk", blocks, pool.map_in[:, place].float()) * tables.map_weight[slot, entry]
    return torch.einsum("njk,jkw->njw", inner, pool.map_out[:, place].float()).reshape(n, H, V)


def _finite(largest: Tensor) -> Tensor:
    """0 in place of -inf: a memory whose weights are all 0 has no largest logit to subtract."""
    return largest.masked_fill(largest == -torch.inf, 0.0)
