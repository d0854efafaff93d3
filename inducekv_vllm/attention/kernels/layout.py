"""The pool, the slot tables and a step's plan as tensors of fixed size and address. Shapes: see the package."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .tiles import LaunchShape, StepPlan

COLUMNS = ("first_token", "entry_tokens", "length", "log_remainder", "decoupled", "map_rank", "map_length")
TERMS = ("token_index", "log_weight", "key_scale", "value_scale")
INTEGERS = ("first_token", "token_index", "entry_tokens", "length", "decoupled", "map_index", "map_rank", "map_length")


@dataclass(frozen=True, eq=False)
class LayerPool:
    """One layer of the resident pool. What no slot names is never read, so it may be NaN."""

    keys: Tensor  # [J, P, D], not rotated; the last dimension is contiguous
    values: Tensor  # [J, P, V], not times the value gate
    value_gate: Tensor  # [N + 1] float32, this layer's value gate of each slot
    bias: Tensor  # [N + 1] float32
    map_in: Tensor | None = None  # [J, Q, G V]; None: the pool has no maps
    map_out: Tensor | None = None  # [J, Q, G V], transposed, not times the value gate

    @cached_property
    def compiled(self) -> dict[Any, Any]:
        """The kernels that launches with this layer have found."""
        return {}

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The kernel's arguments that a launch without maps takes from here."""
        of_keys = {"keys_head": self.keys.stride(0), "keys_token": self.keys.stride(1)}
        of_values = {"values_head": self.values.stride(0), "values_token": self.values.stride(1)}
        tensors = {"keys": self.keys, "values": self.values, "value_gate": self.value_gate, "bias": self.bias}
        of_values["layer_slot"] = self.value_gate.stride(0)
        no_strides = dict.fromkeys(("map_in_head", "map_in_row", "map_out_head", "map_out_row"), 0)
        return {**tensors, "map_in": None, "map_out": None, **of_keys, **of_values, **no_strides}

    @cached_property
    def arguments_with_maps(self) -> dict[str, Any]:
        assert self.map_in is not None
        assert self.map_out is not None
        of_maps = {"map_in": self.map_in, "map_out": self.map_out}
        strides = {
            f"{name}_{part}": tensor.stride(at)
            for name, tensor in of_maps.items()
            for at, part in enumerate(("head", "row"))
        }
        return {**self.arguments, **of_maps, **strides}


@dataclass(frozen=True, eq=False)
class SlotTables:
    """What each slot reads, for all layers. The kernels read nothing beyond a slot's length.

    An entry's tokens are adjacent in the pool, and so are its map rows. A slot's numbers lie side by side, so that one
    copy fills it.
    """

    # Place in the pool of the slot's first token, if all its tokens are adjacent and its terms neutral (key and value
    # scales of 1, log weights of 0): then the next four are not read. -1 if not.
    first_token: Tensor  # [N + 1] int32
    # Place in the pool of an entry's first token, less the slot's tokens before it: token t of the slot lies t behind.
    token_index: Tensor  # [N + 1, K] int32
    log_weight: Tensor  # [N + 1, K] float32, may be -inf
    key_scale: Tensor  # [N + 1, K] float32
    value_scale: Tensor  # [N + 1, K] float32
    entry_tokens: Tensor  # [N + 1] int32, tokens of an entry, at least 1
    length: Tensor  # [N + 1] int32, tokens of all entries
    log_remainder: Tensor  # [N + 1] float32, -inf if there is none; merged memory alone
    decoupled: Tensor  # [N + 1] int32, 1 or 0
    map_index: Tensor  # [N + 1, M] int32, place of an entry's first map row in the pool
    map_weight: Tensor  # [N + 1, M] float32, exp(log_weight) * value_scale of the entry
    map_rank: Tensor  # [N + 1] int32, map rows of an entry, at least 1
    map_length: Tensor  # [N + 1] int32, map rows of all entries; decoupled memory alone

    @classmethod
    def allocate(cls, slots: int, entries: int, maps: int, device: torch.device | str) -> SlotTables:
        """Tables of N = `slots` empty slots of up to K = `entries` entries, and of up to M = `maps` with maps.

        Entries have 1 token and 1 map row.
        """
        size = slots + 1, cls.row_numbers(entries, maps)
        tables = cls.of_rows(torch.zeros(size, dtype=torch.int32, device=device), entries, maps)
        tables.mark_empty()
        return tables

    def mark_empty(self) -> None:
        """Let slots whose numbers are all 0 be empty."""
        self.first_token.fill_(-1)
        self.log_remainder.fill_(-math.inf)
        self.entry_tokens.fill_(1)
        self.map_rank.fill_(1)

    def copy(self) -> SlotTables:
        """The same in rows of their own."""
        (slots, entries), maps = self.token_index.shape, self.map_index.shape[1]
        copied = type(self).allocate(slots - 1, entries, maps, self.token_index.device)
        for name, tensor in vars(self).items():
            getattr(copied, name).copy_(tensor)
        return copied

    @classmethod
    def columns(cls, entries: int, maps: int) -> dict[str, int]:
        """The numbers of each table that a slot has, side by side in one row."""
        terms = dict.fromkeys(TERMS, entries)
        terms |= dict.fromkeys(("map_index", "map_weight"), maps)
        return {field.name: terms.get(field.name, 1) for field in fields(cls)}

    @classmethod
    def row_numbers(cls, entries: int, maps: int) -> int:
        """The numbers of a slot, with what aligns its tables."""
        return sum(map(padded, cls.columns(entries, maps).values()))

    @classmethod
    def of_rows(cls, rows: Tensor, entries: int, maps: int) -> SlotTables:
        """Views of rows [any number, at least `row_numbers`] int32, one for each slot."""
        columns = cls.columns(entries, maps)
        views = dict(zip(columns, views_of(rows, columns.values()), strict=True))
        views |= {name: views[name].squeeze(1) for name in COLUMNS}
        floats = {name: view.view(torch.float32) for name, view in views.items() if name not in INTEGERS}
        return cls(**views | floats)


def padded(numbers: int) -> int:
    """Room for so many numbers of 4 bytes: what follows begins at 16 bytes again, as kernels are compiled for."""
    return -(-numbers // 4) * 4


def views_of(rows: Tensor, sizes: Iterable[int]) -> list[Tensor]:
    """Parts [n, size] of rows [n, at least the sum of the sizes, padded]."""
    firsts = itertools.accumulate(map(padded, sizes), initial=0)
    return [rows[:, first : first + size] for first, size in zip(firsts, sizes, strict=False)]


@dataclass(frozen=True, eq=False)
class StepTensors:
    """`StepPlan` on the device."""

    tile_rows: Tensor  # [tiles, height] int32; -1: no row
    tile_slot: Tensor  # [tiles] int32
    work: Tensor  # [items, 4] int32; empty if memories are not split
    tile_work: Tensor  # [tiles + 1] int32; empty if memories are not split
    count: Tensor  # [1] int32
    arrivals: Tensor  # [at least tiles, J] int32, programs of a tile that have finished: 0 between launches

    @classmethod
    def in_buffer(cls, buffer: Tensor, shape: LaunchShape, arrivals: Tensor) -> StepTensors:
        """A plan for `shape` that lies in a buffer [at least `plan_numbers`] int32."""
        numbers = [math.prod(size) for size in shape.plan_sizes]
        parts = views_of(buffer[None], numbers)
        return cls.of([part.reshape(size) for part, size in zip(parts, shape.plan_sizes, strict=True)], arrivals)

    @classmethod
    def from_plan(cls, plan: StepPlan, kv_heads: int, device: torch.device | str) -> StepTensors:
        """Copy a plan to a device."""
        arrivals = torch.zeros(max(len(plan.tile_work) - 1, 0), kv_heads, dtype=torch.int32, device=device)
        return cls.of([torch.from_numpy(array).to(device) for array in plan.arrays()], arrivals)

    @classmethod
    def of(cls, plan: Sequence[Tensor], arrivals: Tensor) -> StepTensors:
        """From the plan's tensors in the order of `StepPlan.arrays`."""
        rows, slots, work, tile_work, count = plan
        return cls(rows, slots, work, tile_work, count, arrivals)

    @property
    def plan(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """In the order of `StepPlan.arrays`."""
        return self.tile_rows, self.tile_slot, self.work, self.tile_work, self.count


def plan_numbers(shape: LaunchShape) -> int:
    """The size of a buffer for a plan."""
    return sum(padded(math.prod(size)) for size in shape.plan_sizes)


def packed_plan(plan: StepPlan) -> Tensor:
    """A plan as a buffer on the host, for one copy."""
    arrays = [torch.from_numpy(array.reshape(-1)) for array in plan.arrays()]
    return torch.cat([torch.nn.functional.pad(each, (0, padded(len(each)) - len(each))) for each in arrays])
