"""The workers' pool as a cache of versions.

- A version that finds no room lets others leave, the least wanted first (`recency.py`). What a request of any API
  process uses stays, and so does what a pinned name stands for.
- A request for a cold name waits until it is loaded again. Those that ask for the same name share the load, and
  nobody else waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from vllm.engine.protocol import EngineClient
from vllm.exceptions import RetryableRequestError

from inducekv_vllm.attention.pool import rows_of
from inducekv_vllm.errors import CapacityError, InduceKVError
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.vllm_seams.logs import logger_of

from . import engines
from .changes import Changes
from .metrics import COLD_SECONDS, EVICTIONS
from .names import Names, Version
from .reader import BundleReader
from .state import ServerState
from .turn import TURN

logger = logger_of(__name__)
T = TypeVar("T")
ROOM_S: Final = 0.1  # how often a request that waits for room looks what other API processes have left
WAIT_S: Final = 60.0  # so long it waits at most


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


class Residency:
    """See the module docstring. It belongs to the event loop of its API process."""

    def __init__(
        self,
        client: EngineClient,
        state: ServerState,
        names: Names,
        changes: Changes,
        reader: BundleReader,
        follow: Callable[[], Awaitable[None]],
        release: Callable[[ServedBundle], Awaitable[bool]],
        in_background: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        pool: PoolSize,
    ) -> None:
        """
        Args:
            follow: sees what is resident now.
            release: unloads a version that no name stands for, if nothing uses it.
            in_background: a task that goes on whatever becomes of who waits for it.
        """
        self._client, self._state, self._names, self._changes, self._reader = client, state, names, changes, reader
        self._follow, self._release, self._in_background = follow, release, in_background
        self._pool = pool
        self._coming: dict[tuple[str, frozenset[str]], asyncio.Task[None]] = {}  # loads of cold names, beside others

    # ---- requests ------------------------------------------------------------------------------------------------

    async def hold(self, name: str, beside: frozenset[str] = frozenset()) -> str:
        """Make what a name stands for resident, and return its digest.

        It stays so until the HTTP request that runs has ended.

        Args:
            beside: the versions that this request holds already: it waits for none of them to leave.

        Raises:
            UnknownBundle: no bundle of this name is loaded.
            RetryableRequestError: it cannot be loaded now; the log says why.
            CapacityError: it does not fit beside what is pinned and those.
        """
        while (end := self._names.hold(served := self._names.served(name))) is None:
            load = (name, beside)
            if load not in self._coming:
                self._coming[load] = self._in_background(self._warm(name, beside))
                self._coming[load].add_done_callback(partial(self._has_come, load))
            with COLD_SECONDS.time():
                await self._arrival(name, self._coming[load])
        turn = TURN.get()
        if turn is None:
            end()
        else:
            turn.callback(end)
        return served.digest

    def _has_come(self, key: tuple[str, frozenset[str]], load: asyncio.Task[None]) -> None:
        del self._coming[key]
        if not load.cancelled():
            load.exception()  # those who wait get it; if nobody does any more, the log has it already

    async def _arrival(self, name: str, load: asyncio.Task[None]) -> None:
        limit = min(WAIT_S, engines.LOAD_S)
        try:
            async with asyncio.timeout(limit):
                await asyncio.shield(load)
        except TimeoutError as error:
            logger.warning("memory bundle %r was not loaded in %g s: no room, or a change takes long", name, limit)
            raise RetryableRequestError(f"memory bundle {name!r} could not be loaded in {limit:g} s") from error

    async def _warm(self, name: str, beside: frozenset[str]) -> None:
        """Load what a cold name stands for. Raises as `hold`."""
        deadline = time.monotonic() + WAIT_S  # nobody waits any more
        try:
            while not await self._is_warm(name, beside) and time.monotonic() < deadline:
                self._names.unused.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._names.unused.wait(), ROOM_S)
        except CapacityError as error:
            logger.warning("memory bundle %r cannot be loaded: %s", name, error.__cause__ or error)
            raise
        except (InduceKVError, TimeoutError) as error:
            logger.warning("memory bundle %r cannot be loaded: %s", name, error or "it takes too long")
            raise RetryableRequestError(f"memory bundle {name!r} cannot be loaded now") from error

    async def _is_warm(self, name: str, beside: frozenset[str]) -> bool:
        """Whether a name could be made warm, or is no longer cold; False if others than those beside must end first."""
        async with self._changes.alone():
            served = self._state.served(name)
            if served is None or served.resident_bytes is not None:
                return True
            memory = self._state.memory(served.digest)
            if not self._fits(memory, lambda version: version.is_pinned or version.memory.digest in beside):
                raise self._refusal(name, memory, beside)
            if not self._fits(memory, lambda version: version.is_pinned or version.is_used):
                return False
            async with self._reader.again(self._state.records(name)[0], memory) as memory:
                try:
                    async with self.resident(memory, comes_back=True) as nbytes:
                        await asyncio.to_thread(self._state.warm, served.digest, nbytes)
                except CapacityError as error:
                    if await asyncio.to_thread(self._state.evictable) <= beside:
                        raise self._refusal(name, memory, beside) from error
                    return False
            await self._follow()
            return True

    def _refusal(self, name: str, memory: ServedBundle, beside: frozenset[str]) -> CapacityError:
        others = "what is pinned" + (" and the request's other memory" if beside else "")
        return CapacityError(
            f"memory bundle {name!r} does not fit into the pool beside {others}: it needs "
            f"{self._pool.bytes_of(memory)} bytes, and the pool has {self._pool.nbytes}"
        )

    # ---- the pool; a change is alone meanwhile ----------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def resident(self, memory: ServedBundle, *, comes_back: bool = False) -> AsyncIterator[int]:
        """The workers have a version, and drop it again if they did not have it before and the context fails.

        The context gets its bytes in the pool of one rank.

        Args:
            comes_back: without room it will be tried again, and the workers keep what they have read.

        Raises:
            InduceKVError: as for `engines.load`.
            TimeoutError: it takes too long.
        """
        version = self._names.versions.get(memory.digest)
        try:
            yield version.resident_bytes if version else await self._load(memory)
        except BaseException as error:
            if version is None:
                keep = comes_back and isinstance(error, CapacityError)
                unloading = self._in_background(self._unload(memory, keep=keep))
                if not isinstance(error, asyncio.CancelledError):  # out of time
                    await unloading
            raise

    async def _load(self, memory: ServedBundle) -> int:
        """`engines.load`. Others leave before it, as many as have its room, and then while there is none."""
        may_fit = self._fits(memory, lambda version: version.is_pinned)
        if may_fit and (missing := self._pool.bytes_of(memory) - self._free_bytes(lambda version: True)) > 0:
            await self._make_room(0, missing)
        number = 1
        while True:
            try:
                async with asyncio.timeout(engines.LOAD_S):
                    return await engines.load(self._client, memory)
            except CapacityError:  # holes, or memory that requests still read
                if not may_fit or not await self._make_room(number):
                    raise
                number *= 2

    def _fits(self, memory: ServedBundle, stays: Callable[[Version], bool]) -> bool:
        """Whether a version has room beside others, if all leave that do not stay."""
        return self._pool.bytes_of(memory) <= self._free_bytes(stays)

    def _free_bytes(self, stays: Callable[[Version], bool]) -> float:
        """Of the pool, if all others leave."""
        return self._pool.nbytes - sum(v.resident_bytes for v in self._names.versions.values() if stays(v))

    async def _make_room(self, number: int, missing: float = 0.0) -> bool:
        """Let so many of those that are wanted the least leave the pool, and so many bytes; whether any has left."""
        left, freed = 0, 0
        for digest in self._names.recency.least_wanted(await asyncio.to_thread(self._state.evictable)):
            if left >= number and freed >= missing:
                break
            version = self._names.versions.get(digest)
            if await _to_its_end(self._evict(digest)):
                left, freed = left + 1, freed + (version.resident_bytes if version else 0)
        return left > 0

    async def _evict(self, digest: str) -> bool:
        """Whether a version could leave the pool: no request uses it. It may come back, if a name stands for it."""
        version = self._names.versions.get(digest)
        memory = version.memory if version is not None else await asyncio.to_thread(self._state.memory, digest)
        if not self._state.is_named(digest):  # nothing may stay of it, in host memory either
            return await self._release(memory)
        with self._names.leaving(digest) as is_unused:
            if not is_unused or not await asyncio.to_thread(self._state.evict, digest):
                return False
            await self._unload(memory, keep=True)
        await self._follow()
        EVICTIONS.inc()
        logger.info("memory of digest %s has left the pool: others were asked for since", digest)
        return True

    async def _unload(self, memory: ServedBundle, *, keep: bool = False) -> None:
        await engines.unload(self._client, memory, self._names.task_adapters_but(memory.digest), keep=keep)


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of what may not be left half done: if it is cancelled, it ends first."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
