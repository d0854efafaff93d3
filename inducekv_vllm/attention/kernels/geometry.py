"""The launch of a step, and that of a CUDA graph whose steps are not known yet. Shapes: see the package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from .tiles import MOST_LANES, SMALL_MEMORY, IntArray, LaunchShape, Processors, lanes_per_row, launch_shape


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """The rows of a step that memory acts on; 0 in the arrays stands for a row without memory."""

    slots: IntArray  # [R]
    lengths: IntArray  # [R] tokens
    maps: bool  # some memory has maps
    merged: bool  # some memory is merged
    layers: frozenset[int]  # in which some memory does anything

    def pieces(self, size: int) -> Iterator[tuple[slice, MemoryRows]]:
        """Each `size` adjacent rows by themselves, but for those without any memory."""
        for first in range(0, len(self.slots), size):
            rows = slice(first, first + size)
            if self.slots[rows].any():
                yield rows, replace(self, slots=self.slots[rows], lengths=self.lengths[rows])


@dataclass(frozen=True)
class KernelGeometry:
    """What the shape of a launch depends on beside the step."""

    kv_heads: int  # J
    heads_per_kv_head: int  # G
    head_size: int  # D
    value_size: int  # V; below D for latents, which have no maps
    element_size: int  # bytes
    most_tokens: int  # of a memory: those of the pool
    processors: Processors

    def of_step(self, rows: MemoryRows) -> LaunchShape:
        """A launch for rows of this step alone."""
        sizes = np.unique(rows.slots[rows.slots > 0], return_counts=True)[1]
        return self.shape(
            rows=int(sizes.sum()),
            slots=len(sizes),
            largest_slot=int(sizes.max()),
            longest=int(rows.lengths.max()),
            maps=rows.maps,
            lse=rows.merged,
        )

    def of_graph(self, num_rows: int, *, maps: bool, lse: bool) -> LaunchShape:
        """The launch in a graph of this many rows, whatever memories of these kinds its steps will have."""
        return self.shape(
            rows=num_rows,
            slots=num_rows,
            largest_slot=num_rows,
            longest=self.most_tokens,
            maps=maps,
            lse=lse,
        )

    @property
    def has_maps(self) -> bool:
        """Whether memories may have any."""
        return self.value_size == self.head_size

    def variants(self, lse: bool) -> list[LaunchShape]:
        """A launch of each kind that steps and graphs can need; `lse` if memory may be merged."""
        found: dict[tuple[int, ...], LaunchShape] = {}
        lanes = [1 << power for power in range(MOST_LANES.bit_length())]
        for of_tile, longest, maps, merged in product(
            lanes, (SMALL_MEMORY, self.most_tokens), {False, self.has_maps}, {False, lse}
        ):
            rows = max(1, of_tile // lanes_per_row(self.heads_per_kv_head, maps))
            # As few tiles as keep their height: with fewer they are lower, with many more no memory is split.
            tiles = -(-self.processors.count // self.kv_heads)
            shape = self.shape(
                rows=tiles * rows, slots=tiles, largest_slot=rows, longest=longest, maps=maps, lse=merged
            )
            found.setdefault(shape.kind, shape)
        return list(found.values())

    def shape(self, *, rows: int, slots: int, largest_slot: int, longest: int, maps: bool, lse: bool) -> LaunchShape:
        return launch_shape(
            rows=rows,
            slots=slots,
            largest_slot=largest_slot,
            longest=longest,
            heads_per_kv_head=self.heads_per_kv_head,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            value_size=self.value_size,
            element_size=self.element_size,
            maps=maps,
            lse=lse,
            processors=self.processors,
        )
