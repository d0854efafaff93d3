"""Decoupled memory around any attention backend.

    output + value_gate (softmax([memory logits ; 0]) [values ; 0] + maps)

It needs the queries and the output of self-attention alone, neither its log-sum-exp nor the layout of the KV cache. So
it works with every backend and every kind of self-attention: sliding window, sinks, soft caps, quantised caches.

Shapes: see the package.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .cpu_ops import finite_or, fused_attention, is_sum_finite
from .latent import LatentLayer
from .resident_bundle import LayerMemory
from .slots import ActingRows, RequestMemory


@dataclass(frozen=True, eq=False)
class ActiveRows:
    """The rows of a step that one memory acts on."""

    rows: slice | Tensor  # [R] rows of the step's query tensor
    memory: RequestMemory


@dataclass
class DecoupledStep:
    """The active rows of the running step, set before the forward pass; every layer reads them (`AddsMemory`)."""

    active: list[ActiveRows] = field(default_factory=list)  # in the order in which they act
    merged: list[ActiveRows] = field(default_factory=list)  # of merged memory, which is added elsewhere
    deciding: dict[int, Callable[[], None]] = field(default_factory=dict)

    def acts(self, layer: int, num_rows: int) -> bool:
        return any(each.memory.acts[layer] for each in self.active)

    def needs_lse(self, num_rows: int) -> bool:
        """Never."""
        return False

    def cacheable(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See `AddsMemory`. The CPU's attention multiplies unused slots of a block by 0, which leaves NaN and inf."""
        rows = [each.rows for each in (*self.active, *self.merged) if layer > each.memory.first_layer]
        if not rows or (is_sum_finite(key) and is_sum_finite(value)):
            return key, value
        return _cleared(key, rows), _cleared(value, rows)

    def add(self, layer: int, query: Tensor, output: Tensor, self_lse: Tensor | None, scale: float) -> None:
        """Add memory to the output [rows, H, D], in place; query [rows, H, D], rotated."""
        for active in self.active:
            rows, memory = active.rows, active.memory
            if not memory.acts[layer]:
                continue
            if isinstance(rows, slice):
                _add(query[rows], output[rows], memory, layer, scale)
            else:
                picked = output[rows]
                _add(query[rows], picked, memory, layer, scale)
                output[rows] = picked

    def add_latent(self, layer: int, latents: LatentLayer, query: Tensor, output: Tensor) -> None:
        for active in self.active:
            rows, memory = active.rows, active.memory
            if not memory.acts[layer]:
                continue
            (read,) = attend(latents.absorbed(query[rows]), memory, layer, latents.scale)  # [R, H, V]
            picked = output[rows]
            latents.add((read * memory.bundle.layers[layer].value_gate).to(output.dtype), picked)
            if not isinstance(rows, slice):
                output[rows] = picked


def active_rows(acting: Sequence[ActingRows]) -> list[ActiveRows]:
    """Group the rows of a step that memory acts on by round and memory: requests of one task share theirs."""
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by round, and by the memory's slot
    by_slot: dict[int, RequestMemory] = {}
    for each in acting:
        by_slot[each.memory.slot] = each.memory
        ranges.setdefault((each.round, each.memory.slot), []).append((each.first, each.end))
    in_rounds = sorted(ranges, key=lambda each: each[0])
    return [ActiveRows(_rows_of(ranges[each]), by_slot[each[1]]) for each in in_rounds]


def _add(query: Tensor, output: Tensor, memory: RequestMemory, layer: int, scale: float) -> None:
    """Add value_gate (softmax([memory logits ; 0]) [values ; 0] + maps) to output [R, H, D] in place; query [R, H, D].

    Few operations count: for a few rows, each takes no longer than its call.
    """
    stored = memory.bundle.layers[layer]
    R, H, D = query.shape
    J = stored.keys.shape[0]
    read = attend(query, memory, layer, scale)  # [J, R, G, D]
    own = output.clone()
    if stored.map_in is not None:
        blocks = output.view(R, J, -1).transpose(0, 1)  # [J, R, G D]
        blocks.add_(mapped(blocks, stored, memory), alpha=stored.value_gate)
    output.view(R, J, H // J, D).add_(read.transpose(0, 1), alpha=stored.value_gate)
    if (finite := finite_or(output, own)) is not output:
        output.copy_(finite)


def attend(query: Tensor, memory: RequestMemory, layer: int, scale: float) -> Tensor:
    """softmax([memory logits ; 0]) [values ; 0] for query [R, H, D]: [J, R, G, V] float32.

    It is attention to the memory alone, times that memory's share of the whole softmax. The G query heads of a KV head
    are folded into the rows, so K is not repeated.
    """
    keys, values = memory.read(layer)  # [J, S, D] and [J, S, V]
    mask = memory.biased_log_weight  # [L, S]
    R, H, D = query.shape
    J, V = keys.shape[0], values.shape[-1]
    if V < D:  # the kernel takes one size
        values = torch.nn.functional.pad(values, (0, D - V))
    rows = query.view(R, J, H // J, D).transpose(0, 1).reshape(1, J, -1, D)
    read, lse = fused_attention(
        rows, keys[None], values[None], None if mask is None else mask[layer, None, None, None], scale
    )
    return (read * lse.sigmoid()[..., None]).view(J, R, -1, D)[..., :V]


def mapped(blocks: Tensor, stored: LayerMemory, memory: RequestMemory) -> Tensor:
    """What the maps make of self-attention's output [J, R, G D]: [J, R, G D] float32."""
    assert stored.map_in is not None
    assert stored.map_out is not None
    map_in, map_out = stored.map_in[:, memory.map_rows], stored.map_out[:, memory.map_rows]  # [J, k r, G D]
    inner = torch.bmm(blocks.float(), map_in.float().mT)  # [J, R, k r]
    if memory.map_weight is not None:
        inner = inner * memory.map_weight
    return torch.bmm(inner, map_out.float())


def _cleared(numbers: Tensor, rows: Sequence[slice | Tensor]) -> Tensor:
    """A copy of keys or values [all rows, J, D] with 0 for what is not finite in these rows."""
    numbers = numbers.clone()
    for each in rows:
        numbers[each] = numbers[each].nan_to_num(0.0, 0.0, 0.0)
    return numbers


def _rows_of(ranges: Sequence[tuple[int, int]]) -> slice | Tensor:
    """The rows of ascending ranges (first, end): a slice if they are adjacent."""
    if all(end == first for (_, end), (first, _) in itertools.pairwise(ranges)):
        return slice(ranges[0][0], ranges[-1][1])
    return torch.cat([torch.arange(first, end) for first, end in ranges])
