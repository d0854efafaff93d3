"""Query keys by prompt: an LRU, and one computation for requests that ask for the same key at the same time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from .retrieval import FloatArray


@dataclass(frozen=True)
class KeyLookup:
    """A query key and how it came about: computed for this caller, shared with another one, or remembered."""

    key: FloatArray  # [d] float32, unit norm
    source: Literal["computed", "shared", "cached"]


@dataclass
class _Flight:
    task: asyncio.Task[FloatArray]
    waiters: int = 0


class KeyCache:
    """At most `capacity` keys. For one event loop, not for threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, FloatArray] = OrderedDict()
        self._flights: dict[bytes, _Flight] = {}

    def __len__(self) -> int:
        return len(self._keys)

    async def get(self, identity: bytes, compute: Callable[[], Awaitable[FloatArray]]) -> KeyLookup:
        """The key of a prompt, by `compute` where it is not known.

        A caller that is cancelled leaves a running computation to the others that wait for it; when the last one
        leaves, the computation is cancelled. What `compute` raises reaches every caller and is not remembered.
        """
        if (key := self._keys.get(identity)) is not None:
            self._keys.move_to_end(identity)
            return KeyLookup(key, "cached")
        source: Literal["computed", "shared"] = "shared"
        if (flight := self._flights.get(identity)) is None:
            source = "computed"
            flight = self._flights[identity] = _Flight(asyncio.create_task(self._run(identity, compute)))
        flight.waiters += 1
        try:
            return KeyLookup(await asyncio.shield(flight.task), source)
        finally:
            flight.waiters -= 1
            if flight.waiters == 0:
                if self._flights.get(identity) is flight:
                    del self._flights[identity]
                if not flight.task.done():
                    flight.task.cancel()

    async def _run(self, identity: bytes, compute: Callable[[], Awaitable[FloatArray]]) -> FloatArray:
        key = await compute()
        if self._capacity:
            self._keys[identity] = key
            if len(self._keys) > self._capacity:
                self._keys.popitem(last=False)
        return key
