"""The memory of each running request, in a form that the attention backend can look up.

The backend sees neither request ids nor sampling parameters, only the step's block table. So the worker maps the first
KV-cache block of every request to the request's slot, and the backend looks up `block_table[:, 0]`.
This is sound because two requests share their first block only if they share a prefix-cache hash, and the hash includes
a salt computed from the memory and its weights. Requests that share the block therefore share the slot's content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .pages import RequestMemory
from .slots import NO_MEMORY, SlotTable


@dataclass(frozen=True, eq=False)
class _Injection:
    content: str
    memory: RequestMemory


class MemoryOfRequests:
    """Slots of the running requests. The worker calls every method before the step's forward pass."""

    def __init__(self, num_blocks: int, capacity: int, device: torch.device) -> None:
        """Create a table for a KV cache of `num_blocks`, with `capacity` slots, at least one per running request."""
        self.slots = SlotTable(capacity)
        self._slot_of_block = torch.zeros(num_blocks, dtype=torch.int32, device=device)  # [num_blocks]
        self._memory_of_slot: list[RequestMemory | None] = [None] * (capacity + 1)
        self._injections: dict[str, _Injection] = {}  # by request id

    def of_rows(self, first_blocks: Tensor) -> list[RequestMemory | None] | None:
        """Look up the memory of each request of a step by its first KV-cache block [n]; None if none has memory."""
        if not self.slots.used:
            return None
        slots: list[int] = self._slot_of_block[first_blocks.long()].tolist()
        if not any(slots):
            return None
        return [self._memory_of_slot[slot] for slot in slots]

    def start(self, request_id: str, first_block: int, content: str | None, memory: RequestMemory | None) -> None:
        """Add a request that runs for the first time; `content` identifies its memory and weights."""
        if memory is not None:
            assert content is not None
            self._injections[request_id] = _Injection(content, memory)
        self.place(request_id, first_block)

    def place(self, request_id: str, first_block: int) -> None:
        """Set the first block of a request, when it starts and whenever it resumes after a preemption."""
        slot = self.slots.slot_of(request_id)
        injection = self._injections.get(request_id)
        if injection is not None and slot == NO_MEMORY:
            slot, is_new = self.slots.acquire(request_id, injection.content)
            if is_new:
                self._memory_of_slot[slot] = injection.memory
        # Written for requests without memory too: the block may have belonged to a request with memory.
        self._slot_of_block[first_block] = slot

    def pause(self, request_ids: Sequence[str]) -> None:
        """Release the slots of preempted requests; they keep their memory."""
        for request_id in request_ids:
            slot = self.slots.release(request_id)
            if slot is not None:
                self._memory_of_slot[slot] = None

    def finish(self, request_ids: Sequence[str]) -> None:
        """Remove requests that have ended."""
        self.pause(request_ids)
        for request_id in request_ids:
            self._injections.pop(request_id, None)
