"""How bundles change: the kinds of change, and the transaction that each of them is.

A change waits for its turn, is alone in all API processes while it runs, and ends in time. It is shown while it waits
and runs. It takes effect when it is recorded; a refusal is shown, logged and recorded, and changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from enum import StrEnum
from functools import partial
from typing import Any, Final, TypeVar

from inducekv_vllm.errors import InduceKVError, LoadTimeout, TooManyChanges, UnknownBundle, VersionConflict
from inducekv_vllm.frontend.stopping import EngineStop
from inducekv_vllm.vllm_seams.logs import logger_of

from .engines import LOAD_S
from .journal import Journal
from .state import ServerState

logger = logger_of(__name__)
T = TypeVar("T")
WAITING: Final = 8  # changes that may wait for the running one
TURN_S: Final = 0.01  # how often a process looks whether another one's change has ended
# Errors that say nothing about the bundle.
PASSING: Final = (TooManyChanges, UnknownBundle, VersionConflict)


class Change(StrEnum):
    """A kind of change. Its value names it in metrics, answers, the log and the audit chain."""

    LOAD = "load"
    ROLLBACK = "rollback"
    UNLOAD = "unload"
    FORGET = "forget"
    TEACH = "teach"
    FORGET_FACTS = "forget_facts"

    @property
    def makes_first(self) -> bool:
        """Whether it may make the first version of a name."""
        return self in (Change.LOAD, Change.TEACH)

    @property
    def loads(self) -> bool:
        """Whether a bundle is on its way to the workers meanwhile."""
        return self not in (Change.UNLOAD, Change.FORGET)

    @property
    def done(self) -> str:
        """What the log says of a bundle once it is done."""
        return _DONE[self]


_DONE: Final = {
    Change.LOAD: "loaded",
    Change.ROLLBACK: "rolled back",
    Change.UNLOAD: "unloaded",
    Change.FORGET: "freed of earlier versions",
    Change.TEACH: "taught",
    Change.FORGET_FACTS: "freed of facts",
}


class Transaction:
    """A change that has its turn."""

    def __init__(self, limit: asyncio.Timeout, follow: Callable[[], Awaitable[None]]) -> None:
        self._limit, self._follow = limit, follow

    async def record(self, write: Callable[..., T], *arguments: Any) -> T:
        """Record the change, which takes effect with that. Its time limit does not end it any more."""
        if self._limit.expired():
            raise TimeoutError
        self._limit.reschedule(None)
        result = await asyncio.to_thread(write, *arguments)
        await self._follow()
        return result


class Changes:
    """See the module docstring. It belongs to the event loop of its API process."""

    def __init__(
        self,
        state: ServerState,
        journal: Journal,
        stop: EngineStop,
        follow: Callable[[], Awaitable[None]],
        counted: Callable[[Change], AbstractContextManager[None]],
    ) -> None:
        """
        Args:
            follow: serves what the state has now.
            counted: a context that counts and times the change in it.
        """
        self._state, self._journal, self._stop = state, journal, stop
        self._follow, self._counted = follow, counted
        self._turn = asyncio.Lock()
        self._waiting = 0  # changes, the running one included

    @contextlib.asynccontextmanager
    async def making(self, change: Change, name: str, who: str, *, bounded: bool = True) -> AsyncIterator[Transaction]:
        """One change, alone and within the time that it may take. `bounded`: so that not too many wait.

        Raises:
            TooManyChanges: too many changes wait.
            LoadTimeout: it takes too long.
            RetryableRequestError: the server is shutting down.
        """
        limit = LOAD_S
        async with self._shown(change, name, who, bounded):
            with self._counted(change), self._stop.running():
                try:
                    async with asyncio.timeout(limit) as timer, self.alone():
                        yield Transaction(timer, self._follow)
                except TimeoutError as error:
                    reason = f"{change} of {name!r} took longer than {limit:g} s; nothing has changed"
                    raise LoadTimeout(reason) from error

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """One change at a time, in all API processes; what the others have changed is there."""
        async with self._turn:
            while not self._state.begin_change():
                await asyncio.sleep(TURN_S)
            try:
                await self._follow()
                yield
            finally:
                self._state.end_change()

    @contextlib.asynccontextmanager
    async def _shown(self, change: Change, name: str, who: str, bounded: bool) -> AsyncIterator[None]:
        """A change is shown while it waits and runs; if it is refused, that is shown, logged and recorded."""
        began, is_shown, failure = time.monotonic(), False, None
        try:
            with self._waiting_turn() if bounded else contextlib.nullcontext():
                await asyncio.to_thread(self._state.attempt, name, loading=change.loads)
                is_shown = True
                yield
        except BaseException as error:
            failure = error
            raise
        finally:
            reason = None if failure is None else " ".join(str(failure).split()) or repr(failure)
            if is_shown:
                is_of_the_bundle = isinstance(failure, InduceKVError) and not isinstance(failure, PASSING)
                ended = partial(self._state.attempted, name, loading=change.loads, change=change.value, reason=reason)
                with contextlib.suppress(InduceKVError):  # the disk is full
                    await asyncio.to_thread(ended, says_something=failure is None or is_of_the_bundle)
            if isinstance(failure, Exception):
                seconds = time.monotonic() - began
                logger.warning(
                    "%s of memory bundle %.200r by %s refused after %.2f s: %.1000s", change, name, who, seconds, reason
                )
                await self._journal.note(
                    "refusal", change=change.value, name=f"{name:.200}", by=who, reason=f"{reason:.1000}"
                )

    @contextlib.contextmanager
    def _waiting_turn(self) -> Iterator[None]:
        if self._waiting > WAITING:
            raise TooManyChanges(f"{self._waiting} changes of bundles are under way; try again later")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
