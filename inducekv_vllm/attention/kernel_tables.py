"""What every slot reads, as device tensors of fixed size and address that the GPU kernels know.

They have numbers for each entry of a slot, not for its tokens: those of an entry are adjacent in the pool and have
equal terms. So their size is that of the slots times `most_entries`, whatever the size of the pool.

Shapes: see the package; N slots, k entries of a slot.
"""

import numpy as np
import torch
from torch import Tensor

from ..vllm_seams.device import Device
from ..vllm_seams.logs import logger_of
from .kernels.layout import SlotTables, padded, views_of
from .slots import RequestMemory

logger = logger_of(__name__)


class KernelTables:
    """Row 0 belongs to no slot and has no tokens."""

    def __init__(self, num_slots: int, most_entries: int, num_layers: int, device: Device) -> None:
        """Tables of N empty slots of up to `most_entries` entries."""
        self.most_entries = most_entries
        own = SlotTables.row_numbers(most_entries, most_entries)
        self._own, self._num_layers, self._device = own, num_layers, device
        self._rows = torch.zeros(  # [N + 1, all numbers of a slot]
            num_slots + 1, own + 2 * padded(num_layers), dtype=torch.int32, device=device.torch_device
        )
        self.slots, self.value_gate, self.bias = self._views(self._rows)  # the last two [L, N + 1] float32
        self._rows.copy_(device.upload(self._row()))
        logger.info(
            "memory tables: %.1f MiB, for %d slots of up to %d entries", self.nbytes / 2**20, num_slots, most_entries
        )

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def write(self, memory: RequestMemory) -> None:
        """Fill a slot by one copy."""
        bundle, terms, row = memory.bundle, memory.terms, self._row()
        m, r, k = bundle.payload_tokens, bundle.map_rank, len(memory.entries)
        assert k <= self.most_entries
        slot, value_gate, bias = self._views(row)
        if memory.first_entry is not None and terms.are_neutral:
            slot.first_token.fill_(bundle.first_token + memory.first_entry * m)
        slot.token_index[0, :k] = torch.from_numpy(bundle.first_token + (memory.entries - np.arange(k)) * m)
        for name in ("log_weight", "key_scale", "value_scale"):
            getattr(slot, name)[0, :k] = torch.from_numpy(getattr(terms, name))
        slot.map_index[0, :k] = torch.from_numpy(bundle.first_map_row + memory.entries * r)
        slot.map_weight[0, :k] = torch.from_numpy(memory.map_weights)
        slot.entry_tokens.fill_(m)
        slot.length.fill_(k * m)
        slot.map_rank.fill_(max(r, 1))
        slot.map_length.fill_(k * r)
        slot.log_remainder.fill_(terms.log_remainder)
        slot.decoupled.fill_(bundle.form == "decoupled")
        value_gate[:, 0] = torch.tensor([layer.value_gate for layer in bundle.layers])
        bias[:, 0] = torch.tensor([layer.bias for layer in bundle.layers])
        self._device.write(self._rows[memory.slot], row[0])

    def _row(self) -> Tensor:
        """An empty slot's on the host: [1, all numbers of a slot] int32."""
        row = torch.zeros(1, self._rows.shape[1], dtype=torch.int32)
        slot, *_ = self._views(row)
        slot.mark_empty()
        return row

    def _views(self, rows: Tensor) -> tuple[SlotTables, Tensor, Tensor]:
        """Rows [n, all numbers of a slot] as tables, and as value gates and biases [L, n]."""
        layers = views_of(rows[:, self._own :].view(torch.float32), (self._num_layers,) * 2)
        value_gate, bias = (each.T for each in layers)
        return SlotTables.of_rows(rows, self.most_entries, self.most_entries), value_gate, bias
