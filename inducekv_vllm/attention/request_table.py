"""The memory of each running request.

The worker follows the schedule with `start`, `resume`, `preempt` and `finish`, and looks up a step's requests by the
ids in the runner's own batch, which are in the order of the step's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..retrieval.entry_terms import EntryTerms, Form
from .ranges import Region
from .resident_bundle import RequestMemory, ResidentBundle
from .slots import NO_MEMORY, SlotTable


@dataclass(frozen=True, eq=False)
class _Injection:
    content: str
    bundle: ResidentBundle
    terms: EntryTerms
    start: int  # the first position that memory acts on


class MemoryOfRequests:
    """Slots of the running requests, whose bundles stay resident. The worker calls every method before the step's
    forward pass.
    """

    def __init__(
        self,
        capacity: int,
        fill: Callable[[RequestMemory], object],
        release: Callable[[Region], object] = Region.release,
    ) -> None:
        """Create a table with `capacity` slots, at least one per running request.

        Args:
            fill: is called with what a slot reads, once its requests are about to run.
            release: drops a request's reference to its bundle's region. A step waits for it.
        """
        self.slots = SlotTable(capacity)
        self._fill = fill
        self._release = release
        self._memory_of_slot: list[RequestMemory | None] = [None] * (capacity + 1)
        self._injections: dict[str, _Injection] = {}  # by request id

    def __contains__(self, request_id: object) -> bool:
        """Whether this request has memory, running or preempted."""
        return request_id in self._injections

    def of_requests(self, request_ids: Sequence[str], form: Form) -> list[RequestMemory | None] | None:
        """The memory of each request of a step, if it is of this form; None if none has such a memory."""
        if not self.slots.used:
            return None
        memories = [self._memory_of_slot[self.slots.slot_of(request_id)] for request_id in request_ids]
        memories = [memory if memory is not None and memory.bundle.form == form else None for memory in memories]
        return memories if any(memory is not None for memory in memories) else None

    def of_request(self, request_id: str) -> RequestMemory | None:
        """The memory of a running request, if it has one."""
        return self._memory_of_slot[self.slots.slot_of(request_id)]

    def first_active(self, request_id: str) -> int:
        """The first position that the request's memory acts on; 0 for a request without memory."""
        injection = self._injections.get(request_id)
        return 0 if injection is None else injection.start

    def start(self, request_id: str, content: str, bundle: ResidentBundle, terms: EntryTerms, start: int) -> None:
        """Add a request with memory that runs for the first time; `content` identifies its memory and weights."""
        assert request_id not in self, f"request {request_id} has a memory already"
        bundle.region.retain()
        self._injections[request_id] = _Injection(content, bundle, terms, start)
        self.resume(request_id)

    def resume(self, request_id: str) -> None:
        """Assign a slot to a request that starts, or that resumes after a preemption."""
        injection = self._injections.get(request_id)
        if injection is not None and self.slots.slot_of(request_id) == NO_MEMORY:
            slot, is_new = self.slots.acquire(request_id, injection.content)
            if is_new:
                memory = RequestMemory.of(injection.bundle, injection.terms, slot)
                self._fill(memory)
                self._memory_of_slot[slot] = memory

    def preempt(self, request_ids: Iterable[str]) -> None:
        """Release the slots of preempted requests; they keep their memory."""
        for request_id in request_ids:
            slot = self.slots.release(request_id)
            if slot is not None:
                self._memory_of_slot[slot] = None

    def finish(self, request_ids: Iterable[str]) -> None:
        """Remove requests that have ended; the last one that has an unloaded bundle releases its region."""
        for request_id in request_ids:
            self.preempt([request_id])
            if (injection := self._injections.pop(request_id, None)) is not None:
                self._release(injection.bundle.region)
