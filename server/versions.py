"""The life of one version of a bundle in an API process.

    bring     the workers load it, and others leave the pool for it (`bringing.py`)
    hold      an HTTP request has asked for it: it stays in the pool until that request ends
    lease     a request runs on it
    evict     it leaves the pool for others, and may come back: it is cold
    release   no name stands for it and no request uses it: nothing of it stays

What is in the pool is known to all processes by the state (`state.py`), and to this one by its pool (`pool.py`), which
follows the state before each request and five times a second. A change of it, by whichever process, is alone.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Final, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.exceptions import RetryableRequestError

from inducekv_vllm.errors import InduceKVError, UnknownBundle
from inducekv_vllm.vllm_seams.logs import logger_of

from .engines import Engines
from .journal import Journal
from .metrics import EVICTIONS, RegistryMetrics
from .pool import Phase, Pool, Version
from .state import Served, ServerState, StateError

logger = logger_of(__name__)
T = TypeVar("T")
POLL_S: Final = 0.2  # how often a process looks for changes without being asked
PIN: Final = re.compile(r"(?P<name>.+)@(?P<digest>[0-9a-f]{12,64})")  # a digest, or how it begins
TURN_S: Final = 0.01  # how often a process looks whether another one's change has ended


def unpinned(model: str) -> tuple[str, str]:
    """The name and the beginning of the digest; a model that is not pinned is a name, and any digest will do: ""."""
    match = PIN.fullmatch(model)
    return (match["name"], match["digest"]) if match else (model, "")


class Turn(contextlib.ExitStack):
    """What an HTTP request has asked for: it stays until the request ends."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[str, Version] = {}  # by name
        self.callback(self.versions.clear)


TURN: Final[ContextVar[Turn | None]] = ContextVar("inducekv_turn", default=None)  # None outside of a request


class Versions:
    """See the module docstring. They belong to the event loop of their API process."""

    def __init__(self, engines: Engines, state: ServerState, journal: Journal, metrics: RegistryMetrics) -> None:
        self.state, self._engines, self._journal, self._metrics = state, engines, journal, metrics
        self.pool = Pool(engines.pool)
        self._turn = asyncio.Lock()  # of changes of this process
        self._looking = asyncio.Lock()  # what is in the pool is looked at, or changes
        self._seen = -1  # the state's change number that the pool follows
        self._behind: str | None = None  # why the state cannot be followed
        self.background: set[asyncio.Task[Any]] = set()
        self.following: asyncio.Task[None] | None = None

    # ---- the state that all processes share ----------------------------------------------------------------------

    async def begin(self) -> None:
        """Follow the state from now on. Raises StateError: it cannot be read."""
        await self.follow()
        self.following = asyncio.get_running_loop().create_task(self._keep_following())

    async def _keep_following(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.see_changes()

    async def see_changes(self) -> None:
        """`follow`, before a request begins. If that fails, nobody knows what is current, and no bundle is served."""
        try:
            await self.follow()
        except StateError as error:
            if self._behind is None:
                logger.error("no bundle is served until the state can be read: %s", error)
            self._behind = str(error)
        else:
            self._behind = None

    def _check(self) -> None:
        """Raises StateError: the state cannot be read."""
        if self._behind is not None:
            raise StateError(self._behind)

    async def follow(self) -> None:
        """See what is in the pool now, or later. Raises StateError: it cannot be read.

        Once is enough, whatever changes meanwhile: with traces and audited answers that may be at every moment.
        """
        if self.state.change_number() == self._seen:
            return
        async with self._looking:
            if (number := self.state.change_number()) == self._seen:
                return
            exported = self._metrics.exported  # others may begin meanwhile
            snapshot = await asyncio.to_thread(self.state.snapshot, exported)
            self.pool.follow(snapshot.resident)
            self._metrics.follow({name: snapshot.names.get(name) for name in exported}, self.pool.resident)
            self._seen = number

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """One change at a time, in all API processes; what the others have changed is there."""
        async with self._turn:
            while not self.state.begin_change():
                await asyncio.sleep(TURN_S)
            try:
                await self.follow()
                yield
            finally:
                self.state.end_change()

    # ---- requests ------------------------------------------------------------------------------------------------

    def hold(self, models: Sequence[str]) -> tuple[str, Version, frozenset[str]] | None:
        """Hold what names stand for; or nothing, and what is missing: a name, its version, and what it needs beside."""
        self._check()
        found = [(name, self.state.find(name), digest) for name, digest in map(unpinned, models)]
        wanted = {name: served for name, served, digest in found if served and served.digest.startswith(digest)}
        turn = TURN.get()
        with contextlib.ExitStack() as held:
            versions = {}
            for name, served in wanted.items():
                if (version := self._usable(served)) is None:
                    beside = frozenset(each.digest for each in wanted.values()) - {served.digest}
                    return name, self.pool.version(served.digest), beside
                version.holds += 1
                held.callback(self._end_hold, version)
                versions[name] = version
            for version in versions.values():
                self.pool.used(version)
            if turn is not None:
                turn.versions |= versions
                turn.push(held.pop_all())
        return None

    def _end_hold(self, version: Version) -> None:
        version.holds -= 1
        self._end_use(version)

    @contextlib.contextmanager
    def lease(self, name: str, digest: str) -> Iterator[Version]:
        """Run on the version that a name stands for, until the context ends. It is the one that the HTTP request has
        asked for, if the name has got another one since that is not resident.

        Raises:
            UnknownBundle: no bundle of this name is loaded, or it stands for a version that begins otherwise.
            RetryableRequestError: the version has left the pool.
            StateError: the state cannot be read.
        """
        self._check()
        served, turn = self.state.served(name), TURN.get()
        if not served.digest.startswith(digest):
            raise UnknownBundle(f"memory bundle {name!r} stands for {served.digest}, not for {digest}")
        version = turn.versions.get(name) if turn is not None else None
        if version is None or version.digest != served.digest:
            is_asked = version is not None and version.digest.startswith(digest)
            version = self._usable(served) or (version if is_asked else None)
        if version is None:
            raise RetryableRequestError(f"memory bundle {name!r} is not in the pool at this moment; please retry")
        version.leases += 1
        try:
            yield version
        finally:
            version.leases -= 1
            self._end_use(version)

    def _usable(self, served: Served) -> Version | None:
        """A version that is resident, and stays so while it is used."""
        digest, version = served.digest, self.pool.find(served.digest)
        if served.resident_bytes is None or (version is not None and version.phase is Phase.LEAVING):
            return None
        if version is not None and version.is_used:
            return None if self.state.is_leaving(digest) else version
        if not self.state.hold(digest):
            return None
        if version is None or not version.is_in_pool:  # it came a moment ago, and `follow` has not seen it yet
            version = self.pool.came(digest, self.state.memory(digest), served.resident_bytes)
        return version

    def _end_use(self, version: Version) -> None:
        if version.is_used:
            return
        self.state.end_hold(version.digest)
        self.pool.ended()
        with contextlib.suppress(InduceKVError):  # the state cannot be read
            if not self.state.is_named(version.digest):
                self.release(version.digest)

    # ---- the pool; a change is alone meanwhile ----------------------------------------------------------------------

    async def evict(self, version: Version) -> bool:
        """Whether a version could leave the pool: no request uses it. It may come back, if a name stands for it."""
        if not version.is_named:  # nothing may stay of it, in host memory either
            return await self._release(version.digest)
        if not await self._leaves(version, self.state.evict):
            return False
        await self._engines.unload(version.digest, self.pool.adapters_of(version), keep=True)
        EVICTIONS.inc()
        logger.info("memory of digest %s has left the pool: others were asked for since", version.digest)
        return True

    def release(self, digest: str | None) -> None:
        """Nothing stays of a version that no name stands for any more, once no request uses it; None is none."""
        if digest is not None and ((version := self.pool.find(digest)) is None or not version.is_used):
            self.in_background(self._release_in_turn(digest))

    async def _release_in_turn(self, digest: str) -> None:
        async with self.alone():  # it may be loaded again meanwhile
            await self._release(digest)

    async def _release(self, digest: str) -> bool:
        """Whether nothing stays of a version: it is nowhere resident then, and not in the workers' host memory."""
        version, adapters = self.pool.find(digest), []
        if version is not None and version.is_in_pool:
            if not await self._leaves(version, self.state.release):
                return False
            adapters = self.pool.adapters_of(version)
        elif self.state.is_named(digest):
            return False
        is_erased = await self._engines.release(digest, adapters)
        if is_erased is not None:
            await self._journal.note("release", digest=digest, erased=is_erased)
        return True

    async def _leaves(self, version: Version, record: Callable[[str], bool]) -> bool:
        """Record that a version leaves the pool, if no request uses it; none begins to meanwhile."""
        if version.is_used:
            return False
        before, version.phase = version.phase, Phase.LEAVING
        try:
            async with self._looking:
                if is_gone := await asyncio.to_thread(record, version.digest):
                    self.pool.gone(version)
        finally:
            if version.is_in_pool:
                version.phase = before
        return is_gone

    def in_background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that goes on whatever becomes of who waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task


class TurnMiddleware:
    """The turn of an HTTP request: it sees every change before it, and what it has asked for stays until it ends."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await scope["app"].state.inducekv_registry.versions.see_changes()
        with Turn() as turn:
            turn.callback(TURN.reset, TURN.set(turn))
            await self._app(scope, receive, send)
