"""The launch of a step, and that of a CUDA graph whose steps are not known yet. Shapes: see the package."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from .tiles import LEAST_LANES, MOST_LANES, SMALL_MEMORY, IntArray, LaunchShape, Processors, launch_shape


@dataclass(frozen=True, eq=False)
class MemoryRows:
    """The rows of a step that memory acts on; 0 in the arrays stands for a row without memory."""

    slots: IntArray  # [R]
    entry_sets: IntArray  # [R], equal for rows that read the same entries
    lengths: IntArray  # [R] tokens
    maps: bool  # some memory has maps
    merged: bool  # some memory is merged

    @cached_property
    def launches(self) -> list[MemoryRows]:
        """The rows of each launch: two if some slots fill tiles by themselves, and others share entries."""
        filling = (np.bincount(self.slots) >= LEAST_LANES)[self.slots] & (self.slots > 0)  # [R]
        others = (self.slots > 0) & ~filling  # [R]
        if filling.any() and len(np.unique(self.slots[others])) > len(np.unique(self.entry_sets[others])):
            return [self._only(filling), self._only(others)]
        return [self]

    def _only(self, these: npt.NDArray[np.bool_]) -> MemoryRows:
        slots, entry_sets, lengths = (these * array for array in (self.slots, self.entry_sets, self.lengths))
        return replace(self, slots=slots, entry_sets=entry_sets, lengths=lengths)

    @cached_property
    def groups(self) -> IntArray:
        """Which rows of a launch share tiles, [R]: those of one slot, or else those that read the same entries.

        Rows of one slot read their terms once for the tile. So slots are the groups if they fill tiles by themselves,
        and if no two of them read the same entries.
        """
        return self.slots if self.one_slot else self.entry_sets

    @cached_property
    def one_slot(self) -> bool:
        slots, rows_of_slot = np.unique(self.slots[self.slots > 0], return_counts=True)
        sets = np.unique(self.entry_sets[self.entry_sets > 0])
        # Triton compiles for a bool, and fails with one of NumPy's.
        return bool(rows_of_slot.max() >= LEAST_LANES) or len(slots) == len(sets)


@dataclass(frozen=True)
class KernelGeometry:
    """What the shape of a launch depends on beside the step."""

    kv_heads: int  # J
    heads_per_kv_head: int  # G
    head_size: int  # D
    element_size: int  # bytes
    most_tokens: int  # of a memory: those of the pool
    processors: Processors

    def of_step(self, rows: MemoryRows) -> LaunchShape:
        """A launch for rows of this step alone."""
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
            longest=self.most_tokens,
            maps=True,
            lse=lse,
            one_slot=False,
        )

    def variants(self, lse: bool) -> list[LaunchShape]:
        """A launch of each kind that steps and graphs can need; `lse` if memory may be merged."""
        group_sizes = [1 << power for power in range(MOST_LANES.bit_length())]
        lengths = (SMALL_MEMORY, self.most_tokens)
        either = (False, True)
        found: dict[tuple[int, ...], LaunchShape] = {}
        for largest, longest, maps, merged, one_slot in product(group_sizes, lengths, either, {False, lse}, either):
            shape = self.shape(
                rows=largest,
                groups=1,
                largest_group=largest,
                longest=longest,
                maps=maps,
                lse=merged,
                one_slot=one_slot,
            )
            found.setdefault(shape.kind, shape)
        return list(found.values())

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
