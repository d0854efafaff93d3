"""The known bundles: their names, their versions, and how they change.

A *version* is one content (digest). It is resident on the workers once, under any number of names, or *cold*: it has
left the pool, and is loaded again for the next request (`residency.py`). A request leases the version of its name when
it begins and keeps it until it ends. Every API process of a server has a registry, over the state that they share
(`state.py`); none of them is special once the server has started:

- A change is made by the process that is asked, one at a time: load on every rank of every engine, record, serve.
- A request reads in the state what its name stands for. So no request that begins after another one was answered by
  the new version is answered by the old one, whichever processes the two reach.
- A version that no name stands for any more drains: the process whose request is the last to use it unloads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Literal

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.exceptions import RetryableRequestError

from inducekv_vllm import __version__
from inducekv_vllm.bundle import BackboneFingerprint
from inducekv_vllm.errors import BundleError, CapacityError, ConfigError, UnknownBundle, VersionConflict
from inducekv_vllm.frontend.memory_engine import Lease
from inducekv_vllm.frontend.served_bundle import ServedBundle, require_shareable
from inducekv_vllm.frontend.stopping import EngineStop
from inducekv_vllm.teaching import Report
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from inducekv_vllm.vllm_seams.logs import logger_of

from . import engines
from .access import Access
from .cards import card, detail, listing
from .changes import Change, Changes, Transaction
from .following import POLL_S, Following
from .journal import Journal
from .metrics import RegistryMetrics
from .names import MAX_NAMES, Names, unpinned
from .reader import BundleReader, Checked, Teaching
from .residency import PoolSize, Residency
from .resolvers import resolver_of
from .resolving import Resolving
from .schemas import ForgottenVersions, MemoryBundleCard, MemoryBundleDetail, MemoryBundleList
from .state import ServerState, VersionRecord

logger = logger_of(__name__)

START: Final = "start"  # who loads the bundles of the command line
RESOLVER: Final = "resolver"  # who loads what a request has asked for by name
TAUGHT: Final = "taught over HTTP"  # in place of a path
PAGE: Final = 1000  # names of a list


@dataclasses.dataclass(frozen=True)
class ChangedFacts:
    """What a change of facts has done."""

    card: MemoryBundleCard  # of the version that is served now
    report: Report


class BundleRegistry:
    """See the module docstring. It belongs to the event loop of its API process."""

    def __init__(
        self,
        client: EngineClient,
        models: OpenAIServingModels,
        backbone: BackboneFingerprint,
        state: ServerState,
        config: InduceKVConfig | None = None,
        stop: EngineStop | None = None,
        pool: PoolSize | None = None,
    ) -> None:
        """Raises ConfigError: a public key cannot be used."""
        self._client, self._models, self._state = client, models, state
        self._config = config or InduceKVConfig()
        self.journal = Journal(state, self._config)
        self._reader = BundleReader(client, backbone, state, self._config)
        self._metrics = metrics = RegistryMetrics(is_first=state.process == 0)
        self._names = Names(models, state, metrics, self._left)
        self.following = Following(state, self._names)
        stop = stop or EngineStop(client)
        self._changes = Changes(state, self.journal, stop, self.following.follow, metrics.change)
        self._residency = Residency(
            *(client, state, self._names, self._changes, self._reader),
            self.following.follow,
            self._release,
            self.in_background,
            pool or PoolSize(),
        )
        self._resolving: Resolving | None = None
        if self._config.resolver is not None:
            self._resolving = Resolving(
                *(resolver_of(self._config.resolver), state, self._reader, self._config),
                *(self._publish, partial(self.unload, who=RESOLVER), self.in_background),
            )
        self.background: set[asyncio.Task[Any]] = set()

    # ---- start ---------------------------------------------------------------------------------------------------

    async def start(self, run: str, admin_key: str | None = None) -> None:
        """The first process loads the bundles of the settings, and of an earlier server with this state what is pinned.

        Its other names are cold. A name that was changed while that server ran keeps its version, whatever the settings
        say. If that version is damaged, the name keeps what is recorded of it, and its requests are refused. The other
        processes wait for the first one.

        Args:
            run: the server's, the same in all processes.
            admin_key: how the audit chain names the admin's key.

        Raises:
            InduceKVError: a bundle cannot be loaded.
        """
        if self._state.process == 0:
            await asyncio.to_thread(self._state.begin, {"version": __version__, "admin_key": admin_key})
            await self._begin_with_settings()
            for name in await asyncio.to_thread(lambda: self._state.pinned):
                with contextlib.suppress(RetryableRequestError, CapacityError):  # it is logged
                    await self._residency.hold(name)
            await asyncio.to_thread(self._state.begun, run)
        while not await asyncio.to_thread(self._state.has_begun, run):
            await asyncio.sleep(POLL_S)
        await self.following.begin()

    async def _begin_with_settings(self) -> None:
        for name in await asyncio.to_thread(self._state.names_of, START):
            if name not in self._config.bundles:
                await asyncio.to_thread(self._state.drop, name, START)
        for name, path in self._config.bundles.items():
            records = self._state.records(name)
            if records and records[0].by != START:
                logger.warning(
                    "memory bundle %r stays at digest %s of the state file, not %s", name, records[0].digest, path
                )
            else:
                await self.load(name, path, replace=True, pin=True)

    # ---- changes -------------------------------------------------------------------------------------------------

    async def load(
        self,
        name: str,
        path: str,
        *,
        replace: bool = False,
        expected_digest: str | None = None,
        who: str = START,
        access: Access | None = None,
        pin: bool | None = None,
    ) -> MemoryBundleCard:
        """Check a bundle, make it resident on every rank and point `name` to it.

        Loading the content that `name` already stands for changes nothing. An error changes nothing either.

        Args:
            replace: `name` may stand for another version.
            expected_digest: `name` must stand for this version now.
            who: asks for it, for the log.
            access: the folders that the bundle and its adapters must lie in; None for any.
            pin: whether the name's versions stay in the pool; None as before, or not.

        Raises:
            ConfigError: the name is invalid or taken, or the change cannot be recorded.
            VersionConflict: the name does not stand for `expected_digest`.
            BundleError: the file is not a valid bundle, was made for another backbone, or lies elsewhere; or a worker
                cannot load it.
            UnsupportedModel: the bundle needs a LoRA adapter that the server does not have, or the other way round.
            CapacityError: there is no room for it, there are too many bundles, or it takes too long.
            TooManyChanges: too many changes wait.
            RetryableRequestError: the server is shutting down.
        """
        async with self._changing(Change.LOAD, name, who, expected_digest) as made:
            self._check_name(name, replace=replace or expected_digest is not None)
            if access is None:
                source = os.path.abspath(os.path.expanduser(path))
            else:
                source = await asyncio.to_thread(access.inside, path, f"bundle {name!r}")
            checked = await self._reader.read(name, source, access)
            return await self._serve(made, Change.LOAD, _record(name, checked.memory, who, source), checked, pin)

    async def rollback(
        self, name: str, *, digest: str | None = None, expected_digest: str | None = None, who: str = START
    ) -> MemoryBundleCard:
        """Point `name` to an earlier version that is kept: that of `digest`, or the one before.

        It becomes the newest version, so that another rollback goes back to where this one began.

        Raises:
            UnknownBundle: no bundle of this name is loaded.
            ConfigError: no such version is kept, or the change cannot be recorded.
            BundleError: its file is gone or has changed.
            VersionConflict, UnsupportedModel, CapacityError, TooManyChanges, RetryableRequestError: as for `load`.
        """
        async with self._changing(Change.ROLLBACK, name, who, expected_digest) as made:
            if not (earlier := self._names.earlier(name, digest)):
                raise ConfigError(f"memory bundle {name!r} has no earlier version; kept are: none")
            record = dataclasses.replace(earlier[0], loaded_at=datetime.now(UTC), by=who)
            return await self._serve_kept(made, Change.ROLLBACK, record)

    async def forget(
        self, name: str, *, digest: str | None = None, expected_digest: str | None = None, who: str = START
    ) -> ForgottenVersions:
        """Drop the earlier versions of a name, or that of `digest`; a rollback to them is no longer possible.

        Raises:
            UnknownBundle: no bundle of this name is loaded.
            ConfigError: no such version is kept, the name stands for it, or the change cannot be recorded.
            VersionConflict, TooManyChanges, RetryableRequestError: as for `load`.
        """
        async with self._changing(Change.FORGET, name, who, expected_digest) as made:
            served = self._names.served(name).digest
            if digest == served:
                raise ConfigError(f"memory bundle {name!r} stands for the version {digest}: load another one first")
            gone = [each.digest for each in self._names.earlier(name, digest)]
            in_use = await made.record(self._state.forget, name, gone, who)
            logger.info("memory bundle %r: versions %s forgotten by %s", name, ", ".join(gone) or "none", who)
            return ForgottenVersions(name=name, digest=served, forgotten=gone, in_use=in_use)

    async def change_facts(
        self,
        change: Literal[Change.TEACH, Change.FORGET_FACTS],
        name: str,
        teach: Teaching,
        *,
        expected_digest: str | None = None,
        who: str = START,
    ) -> ChangedFacts:
        """Let a name stand for the next version of its bundle, with other facts.

        Args:
            teach: the next version from the served one, which is None where `Change.TEACH` makes the first one.

        Raises:
            InduceKVError: what `teach` raises; or as for `load`.
            RetryableRequestError: also if the resolver cannot say whether it has a bundle of this name.
        """
        if self._resolving is not None:
            await self._resolving.look(name)
        async with self._changing(change, name, who, expected_digest) as made:
            self._check_name(name, replace=True)
            served = self._names.records(name)[0] if name in self._names else None
            async with self._reader.changed(served, teach) as changed:
                record = _record(name, changed.checked.memory, who, TAUGHT)
                shown = await self._serve(made, change, record, changed.checked)
            return ChangedFacts(shown, changed.report)

    async def unload(self, name: str, *, expected_digest: str | None = None, who: str = START) -> str:
        """Remove a name with its versions and return its digest; running requests keep the version until they end.

        Raises:
            UnknownBundle: no bundle of this name is loaded.
            VersionConflict: the name does not stand for `expected_digest`.
            ConfigError: the change cannot be recorded.
            TooManyChanges: too many changes wait.
            RetryableRequestError: the server is shutting down.
        """
        async with self._changing(Change.UNLOAD, name, who, expected_digest) as made:
            digest = self._names.served(name).digest
            self._leave(await made.record(self._state.drop, name, who))
            version = self._names.versions.get(digest)
            used = version.active if version is not None else 0
            logger.info("memory bundle %r unloaded by %s: digest %s, used by %d requests", name, who, digest, used)
            return digest

    async def _publish(self, name: str, checked: Checked, tag: str) -> None:
        """Let a name stand for what the resolver has found, which is cold; the name found first goes if it must.

        Raises:
            InduceKVError: as for `load`.
        """
        async with self._changing(Change.LOAD, name, RESOLVER, bounded=False) as made:
            self._check_memory(name, checked.memory)
            is_new = name not in self._names
            if is_new and self._state.num_names() >= MAX_NAMES and (first := self._state.found_first()):
                self._leave(await asyncio.to_thread(self._state.drop, first, RESOLVER))
            self._check_name(name, replace=True)
            record = _record(name, checked.memory, RESOLVER, checked.memory.path)
            event = Change.LOAD.value if is_new else "replace"
            arguments = (record, checked.memory, None, None, 1, event, None, tag)
            self._leave(await made.record(self._state.point, *arguments))
            logger.info("memory bundle %r found by the resolver: digest %s", name, record.digest)

    async def _serve_kept(self, made: Transaction, change: Change, record: VersionRecord) -> MemoryBundleCard:
        """`_serve`, with a version that the state has."""
        async with self._reader.version(record) as checked:
            return await self._serve(made, change, record, checked)

    async def _serve(
        self, made: Transaction, change: Change, record: VersionRecord, checked: Checked, pin: bool | None = None
    ) -> MemoryBundleCard:
        """Make a checked bundle resident, record it, and log it."""
        began, memory = time.monotonic(), checked.memory
        name, digest = record.name, memory.digest
        self._check_memory(name, memory)
        before = self._names.served(name).digest if name in self._names else None
        event, done = change.value, change.done
        if change is Change.LOAD and before is not None:
            event, done = "replace", "replaced"
        async with self._residency.resident(memory) as resident_bytes:
            left = await made.record(
                self._state.point,
                record,
                memory,
                resident_bytes,
                checked.bundle,
                self._config.keep_versions,
                event,
                pin,
            )
        self._leave(left)
        self._metrics.pointed(name, self._names.versions[digest])
        logger.info(
            "memory bundle %r %s by %s in %.2f s: digest %s, %d entries, %d bytes a rank, from %s",
            name,
            done if before is None else f"{done} (digest before {before})",
            record.by,
            time.monotonic() - began,
            digest,
            memory.num_entries,
            resident_bytes,
            record.source,
        )
        if num_expired := memory.num_entries - len(memory.alive()):
            entries = memory.num_entries
            logger.warning(
                "memory bundle %r: %d of %d entries have expired and are not used", name, num_expired, entries
            )
        return card(self._names, name, is_admin=True)

    @contextlib.asynccontextmanager
    async def _changing(
        self, change: Change, name: str, who: str, expected_digest: str | None = None, *, bounded: bool = True
    ) -> AsyncIterator[Transaction]:
        """`Changes.making`, of a name that stands for what the change expects."""
        async with self._changes.making(change, name, who, bounded=bounded) as made:
            if who == RESOLVER and (served := self._state.served(name)) is not None and served.tag is None:
                raise VersionConflict(f"memory bundle {name!r} was loaded by somebody else since it was looked up")
            is_first = change.makes_first and name not in self._names
            found = "no bundle" if is_first else self._names.served(name).digest
            if expected_digest is not None and found != expected_digest:
                raise VersionConflict(f"memory bundle {name!r}: expected digest {expected_digest:.100}, found {found}")
            yield made

    def _check_name(self, name: str, *, replace: bool) -> None:
        self._names.check_name(name, replace=replace)

    def _check_memory(self, name: str, memory: ServedBundle) -> None:
        """Raises UnsupportedModel: it cannot be served here, or not beside others if it is to be shared."""
        self._names.check_adapters(name, memory, self._client.vllm_config)
        if name == self._config.shared:
            require_shareable(name, memory)

    # ---- requests ------------------------------------------------------------------------------------------------

    def lease(self, model: str) -> AbstractContextManager[Lease]:
        """`Names.lease`: keep the current version of a name resident until the context ends.

        Raises:
            RetryableRequestError: the state cannot be read.
        """
        self.following.check()
        return self._names.lease(model)

    async def bring(self, *models: str) -> None:
        """Make what a request asks for resident, before vLLM looks for the names; nothing for those that are unknown.

        Raises:
            RetryableRequestError: the state cannot be read, or a bundle cannot be found or loaded now.
            CapacityError: a bundle does not fit beside what is pinned and the request's other one.
        """
        self.following.check()
        held: set[str] = set()  # digests
        for name, digest in map(unpinned, models):
            try:
                await self._bring(name, digest, held)
            except RetryableRequestError as error:
                is_damaged = isinstance(error.__cause__, BundleError)
                if self._resolving is None or not is_damaged or not await self._resolving.look_again(name):
                    raise
                await self._bring(name, digest, held)

    async def _bring(self, name: str, digest: str, held: set[str]) -> None:
        if self._resolving is not None:
            await self._resolving.look(name)
        with contextlib.suppress(UnknownBundle):
            if self._names.served(name).digest.startswith(digest):
                held.add(await self._residency.hold(name, frozenset(held)))

    def _leave(self, digest: str | None) -> None:
        """What no name stands for any more is released, if no request uses it: in the pool and in host memory."""
        if digest is None:
            return
        version = self._names.versions.get(digest)
        if version is None:
            self.in_background(self._erase_kept(digest))
        elif not version.is_used:
            self._left(version.memory)

    async def _erase_kept(self, digest: str) -> None:
        """A version that has left the pool may still be in the workers' host memory."""
        async with self._changes.alone():
            await self.following.follow()
            if digest in self._names.versions or self._state.is_named(digest):  # again, meanwhile
                return
            is_erased = await engines.erase_kept(self._client, digest)
            if is_erased is not None:
                await self.journal.note("release", digest=digest, erased=is_erased)

    def _left(self, memory: ServedBundle) -> None:
        self.in_background(self._release_in_turn(memory))

    async def _release_in_turn(self, memory: ServedBundle) -> None:
        async with self._changes.alone():  # it may be loaded again meanwhile
            await self._release(memory)

    async def _release(self, memory: ServedBundle) -> bool:
        """Unload a version, if no name stands for it and no process uses it; a change is alone meanwhile."""
        digest = memory.digest
        with self._names.leaving(digest) as is_unused:
            if not is_unused or not await asyncio.to_thread(self._state.release, digest):
                return False
            await self.following.follow()
        is_erased = await engines.release(self._client, memory, self._names.task_adapters_but(digest))
        if is_erased is not None:
            await self.journal.note("release", digest=digest, erased=is_erased)
        return True

    def in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)
        return task

    # ---- reports -------------------------------------------------------------------------------------------------

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def users_of_adapter(self, adapter: str) -> list[str]:
        """List the bundles that need this LoRA adapter."""
        return self._names.users_of_adapter(adapter)

    def shown(self, *, is_admin: bool = False, after: str = "", limit: int = PAGE) -> MemoryBundleList:
        """The next names after one, in alphabetical order; requests are those of this API process."""
        return listing(self._names, is_admin, after, limit)

    def page(self, after: str, limit: int) -> list[tuple[str, str]]:
        """The next names in alphabetical order, with the digests that they stand for."""
        return self._names.page(after, limit)

    def memory(self, name: str) -> ServedBundle:
        """What a name stands for, resident or not; any thread may ask. Raises UnknownBundle: no bundle of this name."""
        return self._names.known(name).memory

    async def detail(self, name: str, *, is_admin: bool = False) -> MemoryBundleDetail:
        """What is known of a name.

        Raises:
            UnknownBundle: no bundle of this name is loaded, on its way or draining, and none has failed lately.
        """
        return detail(self._names, name, await asyncio.to_thread(self._state.attempt_of, name), is_admin)


def _record(name: str, memory: ServedBundle, who: str, source: str) -> VersionRecord:
    """Of a version that a name is about to stand for."""
    return VersionRecord(name, memory.digest, memory.metadata.parent_digest, datetime.now(UTC), who, source)
