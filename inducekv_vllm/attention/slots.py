"""Reference-counted memory slots.

A slot holds what the attention backend needs to inject one memory with one set of weights. Slots are keyed by content,
so the samples of one request (`n > 1`) and requests that repeat a prompt share a slot. Slot 0 means "no memory".
"""

from __future__ import annotations

from collections.abc import Hashable

from ..errors import CapacityError

NO_MEMORY = 0


class SlotTable:
    """Slots 1..capacity with reference counts by content."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a slot table needs a capacity of at least 1, found {capacity}")
        self.capacity = capacity
        self._free = list(range(capacity, NO_MEMORY, -1))
        self._slot_of_content: dict[Hashable, int] = {}
        self._content_of_slot: dict[int, Hashable] = {}
        self._references: dict[int, int] = {}
        self._slot_of_request: dict[str, int] = {}

    @property
    def used(self) -> int:
        return len(self._references)

    def slot_of(self, request_id: str) -> int:
        """The request's slot, or NO_MEMORY."""
        return self._slot_of_request.get(request_id, NO_MEMORY)

    def acquire(self, request_id: str, content: Hashable) -> tuple[int, bool]:
        """Assign a slot for this content to the request; return the slot and whether it is new and must be filled.

        Raises:
            CapacityError: no slot is free. The table does not change.
        """
        assert request_id not in self._slot_of_request, f"request {request_id} has a slot already"
        slot = self._slot_of_content.get(content)
        is_new = slot is None
        if slot is None:
            if not self._free:
                raise CapacityError(f"all {self.capacity} memory slots are in use")
            slot = self._free.pop()
            self._slot_of_content[content] = slot
            self._content_of_slot[slot] = content
            self._references[slot] = 0
        self._references[slot] += 1
        self._slot_of_request[request_id] = slot
        return slot, is_new

    def release(self, request_id: str) -> int | None:
        """Release the request's slot, if it has one; return the slot if this was its last reference."""
        slot = self._slot_of_request.pop(request_id, None)
        if slot is None:
            return None
        self._references[slot] -= 1
        if self._references[slot]:
            return None
        del self._references[slot]
        del self._slot_of_content[self._content_of_slot.pop(slot)]
        self._free.append(slot)
        return slot

    def check(self) -> None:
        """Assert every invariant; tests call this after each change."""
        counted: dict[int, int] = {}
        for slot in self._slot_of_request.values():
            counted[slot] = counted.get(slot, 0) + 1
        assert counted == self._references
        assert {slot: content for content, slot in self._slot_of_content.items()} == self._content_of_slot
        assert self._content_of_slot.keys() == self._references.keys()
        assert sorted([*self._free, *self._references]) == list(range(1, self.capacity + 1))
