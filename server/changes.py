"""How bundles change: the transaction that each change is.

A change waits for its turn, is alone in all API processes while it runs, and ends in time. It takes effect when it is
recorded; a refusal is logged and recorded, and changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from inducekv_vllm.errors import InduceKVError, LoadTimeout, TooManyChanges, VersionConflict
from inducekv_vllm.frontend.stopping import EngineStop
from inducekv_vllm.vllm_seams.logs import logger_of

from .bringing import Bringing, to_its_end
from .engines import LOAD_S
from .journal import Journal
from .metrics import RegistryMetrics
from .names import Names
from .reader import Checked
from .schemas import Change
from .state import Pointed, VersionRecord
from .versions import Versions

logger = logger_of(__name__)
T = TypeVar("T")
WAITING: Final = 8  # changes that may wait for the running one


class Transaction:
    """A change of a name that has its turn."""

    def __init__(self, changes: Changes, change: Change, name: str, who: str, limit: asyncio.Timeout) -> None:
        self._changes, self._change, self._name, self._who, self._limit = changes, change, name, who, limit

    async def record(self, write: Callable[..., T], *arguments: Any) -> T:
        """Record the change, which takes effect with that. Its time limit does not end it any more."""
        if self._limit.expired():
            raise TimeoutError
        self._limit.reschedule(None)
        result = await to_its_end(asyncio.to_thread(write, *arguments))
        with contextlib.suppress(InduceKVError):  # it is recorded: others see it as soon as they can read it
            await self._changes.versions.follow()
        return result

    async def serve(self, checked: Checked, source: str, *, keep: int, pin: bool | None = None) -> None:
        """Make a checked bundle resident, let the name stand for it, and log it.

        Args:
            source: the path that it was loaded from.
            keep: at most so many versions of the name are kept.
            pin: whether the name's versions stay in the pool; None as before.
        """
        began, memory, versions = time.monotonic(), checked.memory, self._changes.versions
        name, digest = self._name, memory.digest
        self._changes.names.check_memory(name, memory)
        before = versions.state.find(name)
        async with self._changes.bringing.resident(memory) as resident_bytes:
            record, event = self._record(checked, source), self._event(before is None)
            to = Pointed(record, memory, event, resident_bytes, checked.bundle, keep, pin)
            left = await self.record(versions.state.point, to)
        versions.release(left)
        self._changes.metrics.pointed(name, versions.pool.version(digest))
        logger.info(
            "%s of memory bundle %r by %s in %.2f s: digest before %s, now %s, %d entries, %d bytes a rank, from %s",
            event,
            name,
            self._who,
            time.monotonic() - began,
            None if before is None else before.digest,
            digest,
            memory.num_entries,
            resident_bytes,
            source,
        )
        if num_expired := memory.num_entries - len(memory.alive()):
            entries = memory.num_entries
            logger.warning(
                "memory bundle %r: %d of %d entries have expired and are not used", name, num_expired, entries
            )

    async def serve_cold(self, checked: Checked, tag: str) -> None:
        """Let the name stand for a checked bundle, which is cold, with what a resolver says of its file."""
        versions, memory = self._changes.versions, checked.memory
        event = self._event(self._name not in self._changes.names)
        to = Pointed(self._record(checked, memory.path), memory, event, tag=tag)
        versions.release(await self.record(versions.state.point, to))
        logger.info("memory bundle %r found by the resolver: digest %s", self._name, memory.digest)

    async def unload(self) -> str:
        """Take the name away, with its versions; return the digest that it stood for."""
        versions = self._changes.versions
        digest = versions.state.served(self._name).digest
        versions.release(await self.record(versions.state.unload, self._name, self._who))
        version = versions.pool.find(digest)
        used = version.leases if version is not None else 0
        logger.info(
            "memory bundle %r unloaded by %s: digest %s, used by %d requests", self._name, self._who, digest, used
        )
        return digest

    def _record(self, checked: Checked, source: str) -> VersionRecord:
        memory = checked.memory
        return VersionRecord(
            self._name, memory.digest, memory.metadata.parent_digest, datetime.now(UTC), self._who, source
        )

    def _event(self, is_new: bool) -> str:
        """How the audit chain names the change."""
        return "replace" if self._change is Change.LOAD and not is_new else self._change.value


class Changes:
    """See the module docstring. It belongs to the event loop of its API process."""

    def __init__(
        self,
        versions: Versions,
        bringing: Bringing,
        names: Names,
        journal: Journal,
        metrics: RegistryMetrics,
        stop: EngineStop,
    ) -> None:
        self.versions, self.bringing, self.names, self.metrics = versions, bringing, names, metrics
        self._journal, self._stop = journal, stop
        self._waiting = 0  # changes, the running one included

    @contextlib.asynccontextmanager
    async def making(
        self, change: Change, name: str, who: str, *, expected_digest: str | None = None, bounded: bool = True
    ) -> AsyncIterator[Transaction]:
        """One change, alone and within the time that it may take.

        Args:
            expected_digest: the name must stand for this version now.
            bounded: not too many may wait.

        Raises:
            TooManyChanges: too many changes wait.
            UnknownBundle: no bundle of this name is loaded, and the change does not make the first one.
            VersionConflict: the name does not stand for `expected_digest`.
            LoadTimeout: it takes too long.
            RetryableRequestError: the server is shutting down.
        """
        async with self._refusals_recorded(change, name, who):
            with self._waiting_turn(bounded), self.metrics.change(change), self._stop.running():
                try:
                    async with asyncio.timeout(LOAD_S) as timer, self.versions.alone():
                        self._check_expected(change, name, expected_digest)
                        yield Transaction(self, change, name, who, timer)
                except TimeoutError as error:
                    reason = f"{change} of {name!r} took longer than {LOAD_S:g} s; nothing has changed"
                    raise LoadTimeout(reason) from error

    def _check_expected(self, change: Change, name: str, expected_digest: str | None) -> None:
        is_first = change.makes_first and name not in self.names
        found = "no bundle" if is_first else self.versions.state.served(name).digest
        if expected_digest is not None and found != expected_digest:
            raise VersionConflict(f"memory bundle {name!r}: expected digest {expected_digest:.100}, found {found}")

    @contextlib.asynccontextmanager
    async def _refusals_recorded(self, change: Change, name: str, who: str) -> AsyncIterator[None]:
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            reason, seconds = " ".join(str(error).split()) or repr(error), time.monotonic() - began
            logger.warning(
                "%s of memory bundle %.200r by %s refused after %.2f s: %.1000s", change, name, who, seconds, reason
            )
            await self._journal.note(
                "refusal", change=change.value, name=f"{name:.200}", by=who, reason=f"{reason:.1000}"
            )
            raise

    @contextlib.contextmanager
    def _waiting_turn(self, bounded: bool) -> Iterator[None]:
        """Raises TooManyChanges: too many wait already."""
        if bounded and self._waiting > WAITING:
            raise TooManyChanges(f"{self._waiting} changes of bundles are under way; try again later")
        self._waiting += bounded
        try:
            yield
        finally:
            self._waiting -= bounded
