"""What every slot reads, as device tensors of fixed size and address that the GPU kernels know.

They have numbers for each entry of a slot, not for its tokens: those of an entry are adjacent in the pool and have
equal terms. So their size is that of the slots times `most_entries`, whatever the size of the pool.

Shapes: see the package; N slots, k entries of a slot.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..vllm_seams.device import Device
from ..vllm_seams.logs import logger_of
from .kernels.layout import SlotTables
from .slots import RequestMemory

logger = logger_of(__name__)


class KernelTables:
    """Row 0 belongs to no slot and has no tokens. What lies beyond a slot's length is left from earlier memories."""

    def __init__(self, num_slots: int, most_entries: int, num_layers: int, device: Device) -> None:
        """Tables of N empty slots of up to `most_entries` entries."""
        self.most_entries = most_entries
        self.slots = SlotTables.allocate(num_slots, most_entries, most_entries, device.torch_device)
        aligned = -(-(num_slots + 1) // 4) * 4  # every layer's row begins at 16 bytes: kernels are compiled for that
        size = (num_layers, aligned)
        self.value_gate, self.bias = (
            torch.zeros(size, device=device.torch_device)[:, : num_slots + 1] for _ in range(2)
        )  # [L, N + 1] float32
        self._device = device
        logger.info(
            "memory tables: %.1f MiB, for %d slots of up to %d entries", self.nbytes / 2**20, num_slots, most_entries
        )

    @property
    def nbytes(self) -> int:
        return self.slots.nbytes + self.value_gate.nbytes + self.bias.nbytes

    def write(self, memory: RequestMemory) -> None:
        """Fill a slot."""
        slot, bundle, terms, tables = memory.slot, memory.bundle, memory.terms, self.slots
        m, r, k = bundle.payload_tokens, bundle.map_rank, len(memory.entries)
        assert k <= self.most_entries
        # An assignment would copy a number of the host, and wait for the device.
        if memory.first_entry is not None and terms.are_neutral:
            tables.first_token[slot].fill_(bundle.first_token + memory.first_entry * m)
        else:
            tables.first_token[slot].fill_(-1)
            self._put(tables.token_index, slot, bundle.first_token + memory.entries * m)
            self._put(tables.log_weight, slot, terms.log_weight)
            self._put(tables.key_scale, slot, terms.key_scale)
            self._put(tables.value_scale, slot, terms.value_scale)
        self._put(tables.map_index, slot, bundle.first_map_row + memory.entries * r)
        self._put(tables.map_weight, slot, memory.map_weights)
        tables.entry_tokens[slot].fill_(m)
        tables.length[slot].fill_(k * m)
        tables.map_rank[slot].fill_(max(r, 1))
        tables.map_length[slot].fill_(k * r)
        tables.log_remainder[slot].fill_(terms.log_remainder)
        tables.decoupled[slot].fill_(bundle.form == "decoupled")
        self.value_gate[:, slot].copy_(self._device.upload(torch.tensor([layer.value_gate for layer in bundle.layers])))
        self.bias[:, slot].copy_(self._device.upload(torch.tensor([layer.bias for layer in bundle.layers])))

    def _put(self, table: Tensor, slot: int, values: npt.NDArray[np.generic]) -> None:
        """Overwrite the first columns of a slot's row."""
        table[slot, : len(values)].copy_(self._device.upload(torch.from_numpy(values)))
