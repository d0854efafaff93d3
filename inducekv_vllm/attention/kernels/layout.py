"""The pool, the slot tables and a step's plan as tensors of fixed size and address. Shapes: see the package."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .tiles import StepPlan


@dataclass(frozen=True, eq=False)
class LayerPool:
    """The resident pages of one layer. What no slot names is never read, so it may be NaN."""

    keys: Tensor  # [J, P, D], not rotated; the last dimension is contiguous
    values: Tensor  # [J, P, D], not times the gate
    gate: Tensor  # [N + 1] float32, this layer's gate of each slot
    bias: Tensor  # [N + 1] float32
    map_in: Tensor | None = None  # [J, Q, G D]; None: the pool has no maps
    map_out: Tensor | None = None  # [J, Q, G D], transposed, not times the gate


@dataclass(frozen=True, eq=False)
class SlotTables:
    """What each slot reads, for all layers. The kernels read nothing beyond a slot's length."""

    token_index: Tensor  # [N + 1, S] int32, places in the pool
    log_weight: Tensor  # [N + 1, S] float32, may be -inf
    key_scale: Tensor  # [N + 1, S] float32
    value_scale: Tensor  # [N + 1, S] float32
    length: Tensor  # [N + 1] int32, tokens
    log_remainder: Tensor  # [N + 1] float32, -inf if there is none; merged memory alone
    decoupled: Tensor  # [N + 1] int32, 1 or 0
    map_index: Tensor  # [N + 1, M] int32, places in the pool
    map_weight: Tensor  # [N + 1, M] float32, exp(log_weight) * value_scale of the map's entry
    map_length: Tensor  # [N + 1] int32, map rows; decoupled memory alone

    @classmethod
    def allocate(cls, slots: int, longest: int, map_rows: int, device: torch.device | str) -> SlotTables:
        """Tables of N = `slots` empty slots of up to S = `longest` tokens and M = `map_rows` map rows."""

        def table(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots + 1, columns, dtype=dtype, device=device)

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots + 1, dtype=dtype, device=device)

        return cls(
            token_index=table(longest, torch.int32),
            log_weight=table(longest, torch.float32),
            key_scale=table(longest, torch.float32),
            value_scale=table(longest, torch.float32),
            length=column(torch.int32),
            log_remainder=column(torch.float32).fill_(-math.inf),
            decoupled=column(torch.int32),
            map_index=table(map_rows, torch.int32),
            map_weight=table(map_rows, torch.float32),
            map_length=column(torch.int32),
        )


@dataclass(frozen=True, eq=False)
class StepTensors:
    """A step's rows: `StepPlan` on the device, and the slot of each row."""

    row_slot: Tensor  # [at least R] int32; 0: no memory
    tile_rows: Tensor  # [tiles, height] int32; -1: no row
    work: Tensor  # [items, 4] int32; empty if memories are not split
    tile_work: Tensor  # [tiles + 1] int32; empty if memories are not split
    split_rows: Tensor  # [rows] int32; empty if memories are not split

    @classmethod
    def from_plan(cls, plan: StepPlan, row_slot: Tensor) -> StepTensors:
        """Copy a plan to the device of `row_slot` [at least R] int32."""
        return cls(row_slot, *(torch.from_numpy(a).to(row_slot.device) for a in plan.arrays()))

    @property
    def plan(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """In the order of `StepPlan.arrays`."""
        return self.tile_rows, self.work, self.tile_work, self.split_rows

    def copy_plan(self, plan: StepPlan) -> None:
        """Overwrite the plan in place by one for the same `LaunchShape`, as between graph replays."""
        for own, new in zip(self.plan, plan.arrays(), strict=True):
            own.copy_(torch.from_numpy(new))
