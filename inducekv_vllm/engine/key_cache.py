"""A cache of what key passes find, by prompt; concurrent requests for the same share one computation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from cachetools import LRUCache

from .memory_index import QueryFeatures

KeySource = Literal["computed", "shared", "cached", "none"]


@dataclass(frozen=True)
class KeyLookup:
    """What the memory needs of a prompt, and its source.

    Computed for this caller, shared with another one, cached, or "none": the memory needs nothing.
    """

    features: QueryFeatures
    source: KeySource


class KeyCache:
    """Caches at most `capacity` keys. It belongs to one event loop and is not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._keys: LRUCache[bytes, QueryFeatures] = LRUCache(capacity)
        self._last_user: dict[bytes, str] = {}  # of the cached keys, and of some that were evicted
        # Keys being computed; the result is None if the caller was cancelled.
        self._running: dict[bytes, asyncio.Future[QueryFeatures | None]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def drop(self, user: str) -> None:
        """Drop the keys that were last asked for by this user."""
        for identity in [identity for identity, last in self._last_user.items() if last == user]:
            del self._last_user[identity]
            self._keys.pop(identity, None)

    async def get(self, identity: bytes, compute: Callable[[], Awaitable[QueryFeatures]], user: str = "") -> KeyLookup:
        """Return the key of a prompt and call `compute` if it is not cached; `user` asks for it, see `drop`.

        The first caller computes in its own task. Nothing else runs before its first suspension, so prompts reach the
        engine in the order of the calls. Later callers wait for it. If it is cancelled, one of them computes instead.
        An exception from `compute` reaches all callers and is not cached.
        """
        while (running := self._running.get(identity)) is not None:
            if (key := await asyncio.shield(running)) is not None:
                self._last_user[identity] = user
                return KeyLookup(key, "shared")
        if (key := self._keys.get(identity)) is not None:
            self._last_user[identity] = user
            return KeyLookup(key, "cached")

        running = self._running[identity] = asyncio.get_running_loop().create_future()
        try:
            key = await compute()
        except Exception as error:
            running.set_exception(error)
            running.exception()  # marks it as retrieved: there may be no other caller
            raise
        except BaseException:
            running.set_result(None)
            raise
        else:
            running.set_result(key)
        finally:
            del self._running[identity]
        if self._keys.maxsize:
            self._keys[identity] = key
            self._last_user[identity] = user
            if len(self._last_user) > 2 * self._keys.maxsize:
                self._last_user = {each: self._last_user[each] for each in self._keys}
        return KeyLookup(key, "computed")
