"""A step's rows with memory as a launch of the GPU kernels, and the buffers in which a CUDA graph finds them.

Shapes: n requests and R rows of a step; see the package `kernels` for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..device import Device
from .kernels.layout import StepTensors
from .kernels.tiles import LEAST_LANES, SMALL_MEMORY, LaunchShape, Processors, launch_shape, plan_tiles
from .pages import RequestMemory

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """The rows of a step that memory acts on; 0 in the arrays stands for a row without memory."""

    slots: IntArray  # [R]
    page_sets: IntArray  # [R], equal for rows that read the same pages
    lengths: IntArray  # [R] tokens
    maps: bool  # some memory has maps
    merged: bool  # some memory is merged

    @cached_property
    def groups(self) -> IntArray:
        """Which rows share tiles, [R]: those of one slot, or else those that read the same pages.

        Rows of one slot read their terms once for the tile. So slots are the groups if they fill tiles by themselves,
        and if no two of them read the same pages.
        """
        return self.slots if self.one_slot else self.page_sets

    @cached_property
    def one_slot(self) -> bool:
        slots, rows_of_slot = np.unique(self.slots[self.slots > 0], return_counts=True)
        return rows_of_slot.max() >= LEAST_LANES or len(slots) == len(np.unique(self.page_sets[self.page_sets > 0]))


def rows_with_memory(
    memories: Sequence[RequestMemory | None],
    first_active: Sequence[int],
    num_computed: Sequence[int],
    num_scheduled: Sequence[int],
) -> MemoryRows | None:
    """The rows of a step that memory acts on; None if there are none.

    Args:
        memories: of each of the step's n requests, in the order of their rows.
        first_active: [n], the first position that the request's memory acts on.
        num_computed: [n], tokens before this step.
        num_scheduled: [n], rows of this step.
    """
    R = sum(num_scheduled)
    slots, page_sets, lengths = (np.zeros(R, dtype=np.int32) for _ in range(3))
    numbers: dict[tuple[int, bytes], int] = {}
    acting: list[RequestMemory] = []
    end = 0
    for memory, start, computed, rows in zip(memories, first_active, num_computed, num_scheduled, strict=True):
        end += rows
        active = slice(end - rows + max(0, start - computed), end)
        if memory is None or active.start >= end:
            continue
        acting.append(memory)
        slots[active] = memory.slot
        page_sets[active] = numbers.setdefault(memory.page_set, len(numbers) + 1)
        lengths[active] = memory.table_length
    if not acting:
        return None
    return MemoryRows(
        slots,
        page_sets,
        lengths,
        maps=any(memory.bundle.map_rank for memory in acting),
        merged=any(memory.bundle.form == "merged" for memory in acting),
    )


@dataclass(frozen=True)
class KernelGeometry:
    """What the shape of a launch depends on beside the step."""

    kv_heads: int  # J
    heads_per_kv_head: int  # G
    head_size: int  # D
    element_size: int  # bytes
    processors: Processors

    def of_step(self, rows: MemoryRows) -> LaunchShape:
        """A launch for this step alone."""
        sizes = np.unique(rows.groups[rows.groups > 0], return_counts=True)[1]
        return self.shape(
            rows=int(sizes.sum()),
            groups=len(sizes),
            largest_group=int(sizes.max()),
            longest=int(rows.lengths.max()),
            maps=rows.maps,
            lse=rows.merged,
            one_slot=rows.one_slot,
        )

    def of_graph(self, num_rows: int, lse: bool) -> LaunchShape:
        """The launch in a graph of this many rows, whatever memories its steps will have."""
        return self.shape(
            rows=num_rows,
            groups=num_rows,
            largest_group=num_rows,
            longest=SMALL_MEMORY,  # a longer memory is right, too, and a graph has one launch
            maps=True,
            lse=lse,
            one_slot=False,
        )

    def shape(
        self, *, rows: int, groups: int, largest_group: int, longest: int, maps: bool, lse: bool, one_slot: bool
    ) -> LaunchShape:
        """See `kernels.tiles.launch_shape`."""
        return launch_shape(
            rows=rows,
            groups=groups,
            largest_group=largest_group,
            longest=longest,
            heads_per_kv_head=self.heads_per_kv_head,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            element_size=self.element_size,
            maps=maps,
            lse=lse,
            one_slot=one_slot,
            processors=self.processors,
        )


@dataclass(frozen=True, eq=False)
class StepLaunch:
    """What every layer launches in a step."""

    shape: LaunchShape
    tensors: StepTensors

    @classmethod
    def of_step(cls, rows: MemoryRows, shape: LaunchShape, device: Device) -> StepLaunch:
        """In tensors of its own."""
        plan = plan_tiles(rows.groups, rows.lengths, shape)
        arrays = (rows.slots, *plan.arrays())
        return cls(shape, StepTensors(*(device.upload(torch.from_numpy(array)) for array in arrays)))


class GraphBuffers:
    """The plan of the running step, at addresses that captured graphs know.

    One graph runs at a time, so the graphs of all sizes share the buffers. Between steps with memory they are idle.
    """

    def __init__(self, geometry: KernelGeometry, most_rows: int, lse: bool, device: Device) -> None:
        """`most_rows` of the largest graph; 0 if no graph has attention in it."""
        self.most_rows = most_rows
        self._geometry, self._lse, self._device = geometry, lse, device
        shapes = [geometry.of_graph(rows, lse) for rows in range(1, most_rows + 1)]
        numbers = max((shape.tiles * shape.height for shape in shapes), default=0)
        self._row_slot = torch.zeros(most_rows, dtype=torch.int32, device=device.torch_device)
        self._tile_rows = torch.full((numbers,), -1, dtype=torch.int32, device=device.torch_device)
        self._nothing = torch.empty(0, dtype=torch.int32, device=device.torch_device)
        self._written: tuple[int, bytes, bytes] | None = None  # what the buffers hold; None: they are idle

    def launch(self, num_rows: int) -> StepLaunch:
        """What a graph of this many rows launches; it reads the buffers."""
        shape = self._geometry.of_graph(num_rows, self._lse)
        tiles = self._tiles(shape)
        return StepLaunch(shape, StepTensors(self._row_slot[:num_rows], tiles, self._nothing.view(0, 4), self._nothing))

    def write(self, num_rows: int, rows: MemoryRows) -> None:
        """Set the plan of a step that replays the graph of `num_rows` rows; rows beyond the step's are padding."""
        new = (num_rows, rows.slots.tobytes(), rows.page_sets.tobytes())
        if new == self._written:  # as in most steps
            return
        shape = self._geometry.of_graph(num_rows, self._lse)
        plan = plan_tiles(rows.page_sets, rows.lengths, shape)
        self._device.write(self._row_slot[: len(rows.slots)], torch.from_numpy(rows.slots))
        self._device.write(self._tiles(shape), torch.from_numpy(plan.tile_rows))
        self._written = new

    def clear(self) -> None:
        """The step has no memory."""
        if self._written is not None:
            self._tile_rows.fill_(-1)
            self._written = None

    def _tiles(self, shape: LaunchShape) -> Tensor:
        return self._tile_rows[: shape.tiles * shape.height].view(shape.tiles, shape.height)
