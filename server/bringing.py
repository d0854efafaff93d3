"""Cold versions: how the workers get them, who leaves the pool for them, and who waits.

- A version that finds no room lets others leave, the least wanted first (`pool.py`). What a request of any API process
  uses stays, and so does what a pinned name stands for.
- A request for a cold name waits until it is loaded again, and holds nothing meanwhile: two that need each other's
  memories do not wait for each other. Those that ask for the same name share the load, and nobody else waits.
- Who has waited long for room claims it: no request begins any more to use what leaves for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from vllm.exceptions import RetryableRequestError

from inducekv_vllm.errors import BundleError, CapacityError, InduceKVError, UnknownBundle
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.vllm_seams.logs import logger_of

from .engines import Engines
from .metrics import COLD_SECONDS
from .pool import Phase, Room, Version
from .reader import BundleReader
from .versions import Versions

logger = logger_of(__name__)
T = TypeVar("T")
ROOM_S: Final = 0.1  # how often a request that waits for room looks what other API processes have left
PATIENCE_S: Final = 10.0  # who has waited so long for room claims it
WAIT_S: Final = 60.0  # so long a request waits at most


class NotBrought(RetryableRequestError):
    """A bundle cannot be loaded now; HTTP answers 503."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(f"memory bundle {name!r} cannot be loaded now")
        self.name, self.is_damaged = name, isinstance(error, BundleError)


class Bringing:
    """See the module docstring. It belongs to the event loop of its API process."""

    def __init__(self, versions: Versions, engines: Engines, reader: BundleReader) -> None:
        self._versions, self._engines, self._reader = versions, engines, reader
        self._state, self._pool = versions.state, versions.pool

    async def hold(self, models: Sequence[str]) -> None:
        """Make what names stand for resident together, for the HTTP request that runs. It holds nothing while it waits.

        Args:
            models: may be pinned; those that stand for nothing, or for something else, are left out.

        Raises:
            RetryableRequestError: it cannot be loaded now; the log says why.
            CapacityError: it does not fit beside what is pinned and the request's other memory.
        """
        try:
            async with asyncio.timeout(WAIT_S):
                while (missing := self._versions.hold(models)) is not None:
                    with COLD_SECONDS.time():
                        await self._arrival(*missing)
        except TimeoutError as error:
            shown = ", ".join(map(repr, models))
            logger.warning("memory bundle %s was not loaded in %g s: no room, or a change takes long", shown, WAIT_S)
            raise RetryableRequestError(f"memory bundle {shown} could not be loaded in {WAIT_S:g} s") from error

    async def _arrival(self, name: str, version: Version, beside: frozenset[str]) -> None:
        """Those that wait for the same share its load, which goes on whoever gives up."""
        if (load := version.coming.get(beside)) is None:
            load = version.coming[beside] = asyncio.create_task(self._bring(name, version, beside))
            load.add_done_callback(partial(self._has_come, version, beside))
        await asyncio.shield(load)

    def _has_come(self, version: Version, beside: frozenset[str], load: asyncio.Task[None]) -> None:
        del version.coming[beside]
        self._pool.forget(version)
        if not load.cancelled():
            load.exception()  # those who wait get it; if nobody does any more, the log has it already

    async def _bring(self, name: str, version: Version, beside: frozenset[str]) -> None:
        """Load what a cold name stands for, as soon as there is room. Raises as `hold`."""
        began = time.monotonic()
        try:
            self._pool.known(await asyncio.to_thread(self._state.memory, version.digest))
            while not await self._is_there(name, version, beside, waited := time.monotonic() - began):
                if waited > WAIT_S:  # nobody waits any more
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._pool.end_of_use(), ROOM_S)
        except UnknownBundle:  # the name stands for something else by now
            return
        except CapacityError as error:
            logger.warning("memory bundle %r cannot be loaded: %s", name, error.__cause__ or error)
            raise
        except (InduceKVError, TimeoutError) as error:
            logger.warning("memory bundle %r cannot be loaded: %s", name, error or "it takes too long")
            raise NotBrought(name, error) from error
        finally:
            self._end_claim(version)

    async def _is_there(self, name: str, version: Version, beside: frozenset[str], waited: float) -> bool:
        """Whether a version could be loaded, or need not be any more; False if requests on others must end first."""
        async with self._versions.alone():
            served = self._state.find(name)
            if served is None or served.digest != version.digest:
                return True
            if version.is_in_pool:  # it may be about to leave it
                return version.phase is Phase.RESIDENT and not self._state.is_leaving(version.digest)
            if waited > PATIENCE_S:
                self._claim(version, beside)
            match self._pool.room(version, beside):
                case Room.NEVER:
                    raise self._refusal(name, version, beside)
                case Room.LATER:
                    return False
            async with self._reader.again(name, version.memory) as path:
                try:
                    async with self.resident(version.memory, path, beside) as nbytes:
                        await asyncio.to_thread(self._state.bring, version.digest, nbytes)
                except CapacityError as error:
                    if not self._pool.leaving_for(version, beside):
                        raise self._refusal(name, version, beside) from error
                    return False
            return True

    def _refusal(self, name: str, version: Version, beside: frozenset[str]) -> CapacityError:
        others = "what is pinned" + (" and the request's other memory" if beside else "")
        return CapacityError(
            f"memory bundle {name!r} does not fit into the pool beside {others}: it needs {version.nbytes} bytes, and "
            f"the pool has {self._pool.size.nbytes}"
        )

    def _claim(self, version: Version, beside: frozenset[str]) -> None:
        """Let no request begin any more to use as many others as have the room of a version that has waited long.

        Those that run end. Otherwise a large version would wait as long as there are requests for small ones.
        """
        if any(each.claims for each in self._pool if each is not version):  # one after the other
            return
        missing = self._pool.missing(version, version.claims)
        for each in sorted(self._pool.least_wanted(), key=lambda each: each.is_used):
            if missing > 0 and each.digest not in beside and self._state.begin_leaving(each.digest):
                version.claims.append(each)
                each.phase = Phase.LEAVING
                missing -= each.nbytes
        if missing > 0:  # other processes let versions leave, too
            self._end_claim(version)

    def _end_claim(self, version: Version) -> None:
        for each in version.claims:
            self._state.end_leaving(each.digest)
            if each.phase is Phase.LEAVING:
                each.phase = Phase.RESIDENT
        version.claims.clear()

    # ---- a change is alone meanwhile --------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def resident(
        self, memory: ServedBundle, copy: str | None = None, beside: frozenset[str] = frozenset()
    ) -> AsyncIterator[int]:
        """The workers have a version, and drop it again if they did not have it before and the context fails.

        The context gets its bytes in the pool of one rank, and records that it is resident.

        Args:
            copy: where the file of a cold version is now. Without room the load will be tried again, and the workers
                keep what they have read.
            beside: versions that stay.

        Raises:
            InduceKVError: as for `Engines.load`.
            TimeoutError: it takes too long.
        """
        version = self._pool.known(memory) if copy is None else self._pool.version(memory.digest)
        if version.is_in_pool:
            version.phase = Phase.RESIDENT  # whoever has claimed its room finds other
            yield version.nbytes
            return
        version.phase = Phase.COMING
        try:
            nbytes = await self._load(version, copy or memory.path, beside)
            yield nbytes
            self._pool.came(version.digest, memory, nbytes)
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and self._state.is_resident(version.digest):  # it is recorded
                self._pool.came(version.digest, memory, nbytes)
                raise
            version.phase = Phase.COLD
            self._pool.forget(version)
            keep = copy is not None and isinstance(error, CapacityError)
            work = self._engines.unload(version.digest, self._pool.adapters_of(version), keep=keep)
            unloading = self._versions.in_background(work)
            if not isinstance(error, asyncio.CancelledError):  # out of time
                await unloading
            raise

    async def _load(self, version: Version, path: str, beside: frozenset[str]) -> int:
        """`Engines.load`. Others leave before it, as many as have its room, and then while there is none."""
        number = 0
        await self._make_room(version, beside, number)
        while True:
            try:
                return await self._engines.load(version.memory, path)
            except CapacityError:  # holes, or memory that requests still read
                number = max(1, 2 * number)
                if not await self._make_room(version, beside, number):
                    raise

    async def _make_room(self, version: Version, beside: frozenset[str], number: int) -> bool:
        """Let so many of those that are wanted the least leave the pool, and as many as it takes; whether any has."""
        left = 0
        for each in self._pool.leaving_for(version, beside):
            if left >= number and self._pool.missing(version) <= 0:
                break
            left += await to_its_end(self._versions.evict(each))
        return left > 0


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of what may not be left half done: if it is cancelled, it ends first."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
