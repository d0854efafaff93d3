"""The terms of every memory slot, as device tensors of fixed size and address.

The layout is the one that the GPU kernels read. On the CPU, `RequestMemory` is a view of a slot's rows.

Shapes: see the package; N slots, P tokens of the pool, M rows of maps that fit it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..host.device import CpuDevice, Device
from ..retrieval.page_terms import FloatArray, PageTerms
from .pages import RequestMemory, ResidentBundle, span_of
from .pool import PoolShape


@dataclass(frozen=True, eq=False)
class TermTables:
    """Row 0 belongs to no slot and has no tokens. What lies beyond a slot's length is left from earlier memories."""

    token_index: Tensor  # [N + 1, P] int32, places in the pool
    log_weight: Tensor  # [N + 1, P] float32
    key_scale: Tensor  # [N + 1, P] float32
    value_scale: Tensor  # [N + 1, P] float32
    length: Tensor  # [N + 1] int32, tokens
    log_remainder: Tensor  # [N + 1] float32, -inf: none
    decoupled: Tensor  # [N + 1] int32, 1 or 0
    map_index: Tensor  # [N + 1, M] int32, places among the rows of maps
    map_weight: Tensor  # [N + 1, M] float32, exp(log_weight) * value_scale of the map's entry
    map_length: Tensor  # [N + 1] int32, rows of maps
    gate: Tensor  # [L, N + 1] float32
    bias: Tensor  # [L, N + 1] float32
    device: Device

    @classmethod
    def allocate(cls, num_slots: int, pool: PoolShape, device: Device) -> TermTables:
        """Tables of N empty slots, each with room for all of the pool."""

        def table(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device.torch_device)

        N = num_slots + 1
        aligned = -(-N // 4) * 4  # every layer's row begins at 16 bytes: kernels are compiled for that
        return cls(
            token_index=table(N, pool.num_tokens, dtype=torch.int32),
            log_weight=table(N, pool.num_tokens),
            key_scale=table(N, pool.num_tokens),
            value_scale=table(N, pool.num_tokens),
            length=table(N, dtype=torch.int32),
            log_remainder=table(N).fill_(-math.inf),
            decoupled=table(N, dtype=torch.int32),
            map_index=table(N, pool.num_pages, dtype=torch.int32),
            map_weight=table(N, pool.num_pages),
            map_length=table(N, dtype=torch.int32),
            gate=table(pool.num_layers, aligned)[:, :N],
            bias=table(pool.num_layers, aligned)[:, :N],
            device=device,
        )

    @classmethod
    def bytes_of(cls, num_slots: int, pool: PoolShape) -> int:
        """What `allocate` takes."""
        return cls.allocate(num_slots, pool, CpuDevice(torch.device("meta"))).nbytes

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def write(self, slot: int, bundle: ResidentBundle, terms: PageTerms) -> RequestMemory:
        """Fill a slot, with the terms in the order of the memory; adjacent entries are then read without a copy."""
        order = np.argsort(terms.entries)  # [k]
        entries, m, r = terms.entries[order], bundle.payload_tokens, bundle.map_rank
        tokens, map_rows = bundle.tokens[entries].reshape(-1), bundle.map_rows[entries].reshape(-1)  # [k m], [k r]
        nulls = bundle.null_tokens[entries[-1:]] if bundle.form == "decoupled" else tokens[:0]  # the kernels add theirs

        def spread(table: Tensor, per_page: FloatArray, neutral: float) -> Tensor | None:
            row = self._put(
                table, slot, np.concatenate([np.repeat(per_page[order], m), np.full(len(nulls), neutral, np.float32)])
            )
            return None if bool((per_page == neutral).all()) else row

        adjacent = span_of(entries)
        weight = np.exp(terms.log_weight) * terms.value_scale  # [k]
        map_weight = self._put(self.map_weight, slot, np.repeat(weight[order], r))
        log_weight = spread(self.log_weight, terms.log_weight, 0.0)
        self._put(self.token_index, slot, tokens)
        self._put(self.map_index, slot, map_rows)
        # An assignment would copy a number of the host, and wait for the device.
        self.length[slot].fill_(len(tokens))
        self.map_length[slot].fill_(len(map_rows))
        self.log_remainder[slot].fill_(terms.log_remainder)
        self.decoupled[slot].fill_(bundle.form == "decoupled")
        self.gate[:, slot].copy_(self.device.upload(torch.tensor([pages.gate for pages in bundle.layers])))
        self.bias[:, slot].copy_(self.device.upload(torch.tensor([pages.bias for pages in bundle.layers])))
        return RequestMemory(
            bundle=bundle,
            num_tokens=len(tokens) + len(nulls),
            tokens=span_of(np.concatenate([tokens, nulls])),
            key_scale=spread(self.key_scale, terms.key_scale, 1.0),
            log_weight=log_weight,
            value_scale=spread(self.value_scale, terms.value_scale, 1.0),
            log_remainder=terms.log_remainder,
            map_rows=span_of(map_rows),
            map_weight=map_weight if len(map_rows) and not bool((weight == 1).all()) else None,
            slot=slot,
            entries=entries.tobytes(),
            first_entry=adjacent.start if isinstance(adjacent, slice) else None,
        )

    def _put(self, table: Tensor, slot: int, values: npt.NDArray[np.generic]) -> Tensor:
        """Overwrite the first columns of a slot's row, and return them."""
        row = table[slot, : len(values)]
        return row.copy_(self.device.upload(torch.from_numpy(values)))
