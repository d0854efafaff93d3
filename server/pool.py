"""The workers' pool as one API process knows it: its versions, its room, and who is to leave it first.

Whether a version is in the pool, and whether a request may begin to use it, is asked here. The versions that are wanted
the least leave first, by a segmented LRU: what was asked for once is on probation, and leaves first; what is asked for
again is protected. So a scan over many names, each asked for once, throws out what else was asked for once, and leaves
alone what is busy. (Karedla, Love and Wherry, "Caching strategies to improve disk system performance", 1994.)
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from vllm.lora.request import LoRARequest

from inducekv_vllm.bundle.rows import rows_of
from inducekv_vllm.frontend.served_bundle import ServedBundle

from .adapters import task_adapters
from .state import Resident

PROTECTED: Final = 0.8  # of the versions, at most: what is not busy any more goes on probation again


class Phase(StrEnum):
    """Of a version's life."""

    COLD = "cold"  # not in the pool
    COMING = "coming"  # on its way to the workers
    RESIDENT = "resident"  # in the pool
    LEAVING = "leaving"  # in the pool, and no request begins to use it any more


class Room(StrEnum):
    """Whether a version has room in the pool."""

    NEVER = "never"  # not even if all others have left that may
    LATER = "later"  # once requests on others have ended
    NOW = "now"  # others leave, if they must


@dataclass(eq=False)
class Version:
    """One content, from the first request that asks for it to the moment at which it has left the pool."""

    digest: str
    memory: ServedBundle = field(init=False, repr=False)  # known once it is on its way
    phase: Phase = Phase.COLD
    nbytes: int = 0  # in the pool of one rank; by its metadata, until the workers say it
    is_named: bool = True  # whether a name stands for it
    is_pinned: bool = False  # whether a pinned name does
    leases: int = 0  # requests of this API process that run on it
    holds: int = 0  # HTTP requests of this API process that have asked for it, and not ended
    # Loads of it that have begun, or wait for room, by the versions that their requests need beside it.
    coming: dict[frozenset[str], asyncio.Task[None]] = field(default_factory=dict)
    claims: list[Version] = field(default_factory=list)  # those that leave the pool for it

    @property
    def is_used(self) -> bool:
        return bool(self.leases or self.holds)

    @property
    def is_in_pool(self) -> bool:
        return self.phase in (Phase.RESIDENT, Phase.LEAVING)


@dataclass(frozen=True)
class PoolSize:
    """Of one rank. Unless it is known, that there is no room is seen when a worker refuses a load."""

    nbytes: float = math.inf
    row_bytes: int = 0
    heads_per_kv_head: int = 1  # G, tokens of a row

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> PoolSize:
        """From what a worker reports."""
        nbytes, tokens, heads = (stats[name] for name in ("pool_bytes", "pool_tokens", "heads_per_kv_head"))
        return cls(nbytes, nbytes // tokens * heads, heads)

    def bytes_of(self, memory: ServedBundle) -> int:
        """What a version takes."""
        return rows_of(memory.metadata, self.heads_per_kv_head) * self.row_bytes


class Pool:
    """See the module docstring. It belongs to the event loop of its API process."""

    def __init__(self, size: PoolSize) -> None:
        self.size = size
        self._versions: dict[str, Version] = {}  # that are in the pool or on their way into it, by digest
        self._recency = Recency()
        self._end_of_use = asyncio.Event()

    def __iter__(self) -> Iterator[Version]:
        return iter(self._versions.values())

    def find(self, digest: str) -> Version | None:
        return self._versions.get(digest)

    def version(self, digest: str) -> Version:
        """That of a digest; it is cold if nothing was known of it."""
        return self._versions.setdefault(digest, Version(digest))

    def known(self, memory: ServedBundle) -> Version:
        """A version that is to be loaded, unless it is in the pool."""
        version = self.version(memory.digest)
        if not version.is_in_pool:
            version.memory, version.nbytes = memory, self.size.bytes_of(memory)
        return version

    @property
    def resident(self) -> dict[str, Version]:
        """The versions that are in the pool, by digest. Any thread may ask."""
        return {digest: version for digest, version in list(self._versions.items()) if version.is_in_pool}

    def follow(self, resident: Mapping[str, Resident]) -> None:
        """What is in the pool by what all processes know."""
        for digest, found in resident.items():
            version = self.came(digest, found.memory, found.nbytes)
            version.is_named, version.is_pinned = found.is_named, found.is_pinned
        for digest in self.resident.keys() - resident.keys():
            if not self._versions[digest].is_used:  # otherwise it came a moment ago
                self.gone(self._versions[digest])

    def came(self, digest: str, memory: ServedBundle, nbytes: int) -> Version:
        version = self.version(digest)
        if not version.is_in_pool:
            version.memory, version.nbytes, version.phase = memory, nbytes, Phase.RESIDENT
            self._recency.came(digest)
        return version

    def gone(self, version: Version) -> None:
        version.phase = Phase.COLD
        self._recency.gone(version.digest)
        self.forget(version)

    def forget(self, version: Version) -> None:
        """A version that is cold, and that nobody waits for any more, is not known here."""
        if version.phase is Phase.COLD and not version.coming and self.find(version.digest) is version:
            del self._versions[version.digest]

    def used(self, version: Version) -> None:
        """A request asks for a version of the pool."""
        self._recency.used(version.digest)

    def ended(self) -> None:
        """Nobody uses some version any more."""
        self._end_of_use.set()
        self._end_of_use = asyncio.Event()

    async def end_of_use(self) -> None:
        """Wait for the next `ended`."""
        await self._end_of_use.wait()

    def room(self, version: Version, beside: frozenset[str] = frozenset()) -> Room:
        """Whether a version has room, beside what is pinned and what is beside it whoever uses it."""
        resident = self.resident.values()
        for_good = [each for each in resident if each.is_pinned or each.digest in beside]
        claimed = [each for each in resident if each.phase is Phase.LEAVING and each not in version.claims]
        used = {*for_good, *claimed, *(each for each in resident if each.is_used)}
        if version.nbytes > self._free_beside(for_good):
            return Room.NEVER
        return Room.NOW if version.nbytes <= self._free_beside(used) else Room.LATER

    def missing(self, version: Version, besides: Collection[Version] = ()) -> float:
        """So many bytes must leave the pool for a version, besides those of some that leave it."""
        return version.nbytes - self._free_beside(each for each in self.resident.values() if each not in besides)

    def _free_beside(self, versions: Iterable[Version]) -> float:
        return self.size.nbytes - sum(version.nbytes for version in versions)

    def leaving_for(self, version: Version, beside: frozenset[str] = frozenset()) -> list[Version]:
        """Those that may leave the pool for a version, in the order in which they are to; none if it never fits."""
        if self.room(version, beside) is Room.NEVER:
            return []
        in_order = (*version.claims, *self.least_wanted())
        return [each for each in in_order if each.is_in_pool and each.digest not in beside]

    def least_wanted(self) -> list[Version]:
        """The versions that may leave the pool for others, in the order in which they are to; those that take room."""
        resident = self.resident
        may_leave = {d for d, v in resident.items() if v.phase is Phase.RESIDENT and v.nbytes and not v.is_pinned}
        return [resident[digest] for digest in self._recency.least_wanted(may_leave)]

    def adapters_of(self, version: Version) -> list[LoRARequest]:
        """Those of a version's tasks that no other one needs."""
        if not version.memory.metadata.task_adapters:
            return []
        others = [each for each in self.resident.values() if each is not version]
        needed = {adapter.lora_int_id for each in others for adapter in task_adapters(each.memory).values()}
        own = task_adapters(version.memory).values()
        return [adapter for adapter in own if adapter.lora_int_id not in needed]


class Recency:
    """In which order versions are to leave, by what this API process was asked for."""

    def __init__(self) -> None:
        # Both: the least recently used first.
        self._probation: dict[str, bool] = {}  # whether it was asked for since it came
        self._protected: dict[str, None] = {}

    def came(self, digest: str) -> None:
        """A version is in the pool."""
        if digest not in self._protected:
            self._probation.setdefault(digest, False)

    def used(self, digest: str) -> None:
        """A request asks for a version of the pool."""
        if not (digest in self._protected or self._probation.get(digest)):
            self._probation.pop(digest, None)
            self._probation[digest] = True
            return
        self.gone(digest)
        self._protected[digest] = None
        while len(self._protected) > max(1, PROTECTED * (len(self._protected) + len(self._probation))):
            oldest = next(iter(self._protected))
            del self._protected[oldest]
            self._probation[oldest] = True

    def gone(self, digest: str) -> None:
        """A version has left the pool."""
        self._probation.pop(digest, None)
        self._protected.pop(digest, None)

    def least_wanted(self, digests: Collection[str]) -> list[str]:
        """These versions of the pool, in the order in which they are to leave."""
        return [each for each in (*self._probation, *self._protected) if each in digests]
