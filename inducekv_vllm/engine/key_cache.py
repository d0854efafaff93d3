"""Query keys by prompt: an LRU, and one computation for requests that ask for the same key at the same time."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from ..retrieval import FloatArray


@dataclass(frozen=True)
class KeyLookup:
    """A query key and how it came about: computed for this caller, shared with another one, or remembered."""

    key: FloatArray  # [2, d] float32, see `query_keys.QueryKey`
    source: Literal["computed", "shared", "cached"]


class KeyCache:
    """At most `capacity` keys. For one event loop, not for threads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, FloatArray] = OrderedDict()
        # What is being computed; the result is None where its caller was cancelled.
        self._running: dict[bytes, asyncio.Future[FloatArray | None]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    async def get(self, identity: bytes, compute: Callable[[], Awaitable[FloatArray]]) -> KeyLookup:
        """The key of a prompt, by `compute` where it is not known.

        The first caller computes, in its own task: up to its first suspension nothing else runs, so prompts reach the
        engine in the order of the calls. Later callers wait for it. When it is cancelled, one of them computes instead;
        what `compute` raises reaches all of them, and is not remembered.
        """
        while (running := self._running.get(identity)) is not None:
            if (key := await asyncio.shield(running)) is not None:
                return KeyLookup(key, "shared")
        if (key := self._keys.get(identity)) is not None:
            self._keys.move_to_end(identity)
            return KeyLookup(key, "cached")

        running = self._running[identity] = asyncio.get_running_loop().create_future()
        try:
            key = await compute()
        except Exception as error:
            running.set_exception(error)
            running.exception()  # there may be nobody to see it
            raise
        except BaseException:
            running.set_result(None)
            raise
        else:
            running.set_result(key)
        finally:
            del self._running[identity]
        self._remember(identity, key)
        return KeyLookup(key, "computed")

    def _remember(self, identity: bytes, key: FloatArray) -> None:
        if self._capacity:
            self._keys[identity] = key
            if len(self._keys) > self._capacity:
                self._keys.popitem(last=False)
