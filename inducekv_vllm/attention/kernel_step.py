"""A step's rows with memory as a launch of the GPU kernels, and the buffers in which a CUDA graph finds them.

Shapes: n requests and R rows of a step; see the package `kernels` for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from ..vllm_seams.device import Device
from .kernels.geometry import KernelGeometry, MemoryRows
from .kernels.layout import StepTensors, packed_plan, plan_numbers
from .kernels.tiles import LaunchShape, plan_tiles
from .slots import ActingRows


def rows_with_memory(acting: Sequence[ActingRows], num_rows: int) -> MemoryRows | None:
    """The rows of a step that memory acts on, as the kernels take them; None if there are none.

    Args:
        num_rows: R of the step.
    """
    if not acting:
        return None
    slots, lengths = (np.zeros(num_rows, dtype=np.int32) for _ in range(2))
    for each in acting:
        slots[each.first : each.end] = each.memory.slot
        lengths[each.first : each.end] = each.memory.num_tokens
    return MemoryRows(
        slots,
        lengths,
        maps=any(each.memory.bundle.map_rank for each in acting),
        merged=any(each.memory.bundle.form == "merged" for each in acting),
        layers=frozenset[int]().union(*{each.memory.slot: each.memory.layers for each in acting}.values()),
    )


def in_rounds(acting: Sequence[ActingRows], num_rows: int) -> tuple[MemoryRows | None, MemoryRows | None]:
    """`rows_with_memory` of the memories that act first, and of those that act on what these have made."""
    first, second = ([each for each in acting if each.round == number] for number in range(2))
    return rows_with_memory(first, num_rows), rows_with_memory(second, num_rows)


class GraphKind(Enum):
    """What memory the steps have that a CUDA graph is captured for: it launches nothing beyond that."""

    NONE = "no memory"
    FEW = "decoupled memory in the layers that it usually is in"
    DECOUPLED = "decoupled memory without maps"
    EVERY = "memory of every form"
    TWO = "memory of every form, and behind it a second one of the same requests"


def graph_kind(
    rows: MemoryRows | None, behind: MemoryRows | None = None, few: frozenset[int] = frozenset()
) -> GraphKind:
    """Of a step with these rows: see `in_rounds`.

    Args:
        few: the layers of graphs for memory in few layers; none if there are no such graphs.
    """
    if rows is None:
        return GraphKind.NONE
    if behind is not None:
        return GraphKind.TWO
    if few and rows.layers <= few:
        return GraphKind.FEW
    return GraphKind.EVERY if rows.maps or rows.merged else GraphKind.DECOUPLED


@dataclass(frozen=True, eq=False)
class StepLaunch:
    """What every layer launches in a step."""

    shape: LaunchShape
    tensors: StepTensors

    @classmethod
    def of_step(cls, rows: MemoryRows, geometry: KernelGeometry, device: Device) -> StepLaunch:
        """In tensors of its own."""
        shape = geometry.of_step(rows)
        plan = device.upload(packed_plan(plan_tiles(rows.slots, rows.lengths, shape)))
        arrivals = _no_arrivals(shape.tiles if shape.split else 0, geometry, device)
        return cls(shape, StepTensors.in_buffer(plan, shape, arrivals))


class GraphBuffers:
    """The plan of the running step, at addresses that captured graphs know.

    One graph runs at a time, so the graphs of all sizes and kinds share the buffers.
    """

    def __init__(
        self, geometry: KernelGeometry, most_rows: int, lse: bool, device: Device, *, few: bool = False
    ) -> None:
        """
        Args:
            most_rows: of the largest graph, 0 if no graph has attention in it.
            few: there are graphs for memory in few layers.
        """
        self.most_rows = most_rows
        self._geometry, self._lse, self._device, self._few = geometry, lse, device, few
        with_memory = [kind for kind in self.kinds if kind != GraphKind.NONE]
        shapes = [self.shape(rows, kind) for rows in range(1, most_rows + 1) for kind in with_memory]
        self._arrivals = _no_arrivals(most_rows, geometry, device)
        numbers = max(map(plan_numbers, shapes), default=0)
        self._plan = torch.zeros(numbers, dtype=torch.int32, device=device.torch_device)
        self._written: tuple[int | GraphKind | bytes, ...] | None = None  # what the buffers hold

    @property
    def kinds(self) -> tuple[GraphKind, ...]:
        """That graphs are captured for, where a request has one memory."""
        is_every = not self._geometry.has_maps and not self._lse
        kinds = (GraphKind.NONE, *([GraphKind.FEW] if self._few else []), GraphKind.DECOUPLED)
        return kinds if is_every else (*kinds, GraphKind.EVERY)

    def shape(self, num_rows: int, kind: GraphKind) -> LaunchShape:
        """Of the launch in a graph of this many rows."""
        is_every = kind in (GraphKind.EVERY, GraphKind.TWO)
        maps = (is_every or kind == GraphKind.FEW) and self._geometry.has_maps
        return self._geometry.of_graph(num_rows, maps=maps, lse=is_every and self._lse)

    def launch(self, num_rows: int, kind: GraphKind) -> StepLaunch:
        """What a graph of this many rows launches; it reads the buffers."""
        shape = self.shape(num_rows, kind)
        return StepLaunch(shape, StepTensors.in_buffer(self._plan, shape, self._arrivals))

    def write(self, num_rows: int, rows: MemoryRows, kind: GraphKind) -> None:
        """Set the plan of a step that replays the graph of `num_rows` rows; rows beyond the step's are padding."""
        # A slot that is written anew may have another length, and then its tokens are shared out anew.
        new = (num_rows, kind, rows.slots.tobytes(), rows.lengths.tobytes())
        if new == self._written:  # as in most steps
            return
        plan = packed_plan(plan_tiles(rows.slots, rows.lengths, self.shape(num_rows, kind)))
        self._device.write(self._plan[: len(plan)], plan)
        self._written = new


def _no_arrivals(tiles: int, geometry: KernelGeometry, device: Device) -> Tensor:
    return torch.zeros(tiles, geometry.kv_heads, dtype=torch.int32, device=device.torch_device)
