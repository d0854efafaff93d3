"""Which memory each running request has, as the attention backend can look it up.

The backend sees neither request ids nor sampling parameters, only the step's block table. So the worker writes, for
the first KV-cache block of every request, the request's slot; the backend reads it back from `block_table[:, 0]`.
That is sound because two requests share their first block only when they share a prefix-cache hash, and the hash holds
a salt made of the memory and its weights: requests that share the block share the content of the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .pages import RequestMemory
from .slots import NO_MEMORY, SlotTable


@dataclass(frozen=True, eq=False)
class _Wanted:
    content: str
    memory: RequestMemory


class MemoryOfRequests:
    """Slots of the running requests; every method is called by the worker before the step's forward pass."""

    def __init__(self, num_blocks: int, capacity: int, device: torch.device) -> None:
        """`num_blocks` of the KV cache; `capacity` slots, at least as many as requests can run at once."""
        self.slots = SlotTable(capacity)
        self._slot_of_block = torch.zeros(num_blocks, dtype=torch.int32, device=device)  # [num_blocks]
        self._memory_of_slot: list[RequestMemory | None] = [None] * (capacity + 1)
        self._wanted: dict[str, _Wanted] = {}

    def of_rows(self, first_blocks: Tensor) -> list[RequestMemory | None] | None:
        """The memory of each request of a step, from its first KV-cache block [n]; None when none has memory."""
        if not self.slots.used:
            return None
        slots: list[int] = self._slot_of_block[first_blocks.long()].tolist()
        if not any(slots):
            return None
        return [self._memory_of_slot[slot] for slot in slots]

    def start(self, request_id: str, first_block: int, content: str | None, memory: RequestMemory | None) -> None:
        """A request runs for the first time; `content` names its memory and weights."""
        if memory is not None:
            assert content is not None
            self._wanted[request_id] = _Wanted(content, memory)
        self.place(request_id, first_block)

    def place(self, request_id: str, first_block: int) -> None:
        """A request got its blocks: when it starts, and again whenever it resumes after a preemption."""
        slot = self.slots.slot_of(request_id)
        wanted = self._wanted.get(request_id)
        if wanted is not None and slot == NO_MEMORY:
            slot, is_new = self.slots.acquire(request_id, wanted.content)
            if is_new:
                self._memory_of_slot[slot] = wanted.memory
        # Written for requests without memory too: the block may have belonged to one that had it.
        self._slot_of_block[first_block] = slot

    def pause(self, request_ids: Sequence[str]) -> None:
        """These requests lost their blocks to others; they keep their memory, but not a slot."""
        for request_id in request_ids:
            slot = self.slots.release(request_id)
            if slot is not None:
                self._memory_of_slot[slot] = None

    def finish(self, request_ids: Sequence[str]) -> None:
        """These requests are over."""
        self.pause(request_ids)
        for request_id in request_ids:
            self._wanted.pop(request_id, None)
