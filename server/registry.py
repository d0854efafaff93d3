"""The loaded bundles: their names, their versions, and how they change.

A *version* is one content (digest). It is resident on the workers once, under any number of names. A request leases the
version of its name when it begins and keeps it until it ends. Every API process of a server has a registry, over the
state that they share (`state.py`); none of them is special once the server has started:

- A change is made by the process that is asked, one at a time: load on every rank of every engine, record, serve.
- A process looks whether the state has changed before it begins with a request. So no request that begins after another
  one was answered by the new version is answered by the old one, whichever processes the two reach.
- A version that no name stands for any more drains: each process says when none of its own requests uses it, and the
  last one unloads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.exceptions import RetryableRequestError

from inducekv_vllm import __version__
from inducekv_vllm.backbone.stored_facts import FactReader
from inducekv_vllm.bundle import BackboneFingerprint, Bundle, BundleMetadata
from inducekv_vllm.engine.memory import Memory
from inducekv_vllm.engine.memory_engine import Lease
from inducekv_vllm.engine.stopping import EngineStop
from inducekv_vllm.errors import (
    BundleError,
    CapacityError,
    ConfigError,
    InduceKVError,
    LoadTimeout,
    TooManyChanges,
    UnknownBundle,
    UnsupportedModel,
    VersionConflict,
)
from inducekv_vllm.host.config import InduceKVConfig
from inducekv_vllm.host.logs import logger_of
from inducekv_vllm.workers.cpu_lora import groups_adapters

from . import engines
from .access import KEY_DIGITS, Access
from .metrics import RegistryMetrics
from .moved import MM_PARSER_MAP
from .names import PIN, Names, task_adapters
from .reader import BundleReader, Checked
from .schemas import (
    NAME_PATTERN,
    BundleState,
    DrainingMemory,
    ForgottenVersions,
    MemoryBundleCard,
    MemoryBundleDetail,
    MemoryBundleList,
    MemoryFailure,
)
from .state import ServerState, VersionRecord

logger = logger_of(__name__)
T = TypeVar("T")

STRANGERS, STRANGERS_S = 10, 60.0  # so many refusals of changes without the admin key are recorded in so long
START: Final = "start"  # who loads the bundles of the command line
TAUGHT: Final = "taught over HTTP"  # in place of a path
ERASE_S: Final = 5.0  # so long changes wait for the memory of a version to be overwritten
NOTED_S: Final = 60.0  # how often it is written down which facts have answered
POLL_S: Final = 0.2  # how often a process looks for changes without being asked
TURN_S: Final = 0.01  # how often it looks whether another one's change has ended
FIRST: Final = frozenset({"load", "restore", "teach"})  # they may make the first version of a name
LOADS: Final = frozenset({"load", "rollback", "restore", "teach", "forget_facts"})
# They say nothing about the bundle.
PASSING: Final = (TooManyChanges, UnknownBundle, VersionConflict)
_NAME: Final = re.compile(NAME_PATTERN)
# vLLM applies an adapter named after a kind of message part ("image", "text") to every request with such a part.
PART_KINDS: Final = frozenset(kind.split("_")[0] for kind in MM_PARSER_MAP) | {
    "audio",
    "file",
    "image",
    "text",
    "video",
}
_DONE: Final = {"load": "loaded", "replace": "replaced", "rollback": "rolled back", "restore": "restored"} | {
    "teach": "taught",
    "forget_facts": "freed of facts",
}


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
        processes: int = 1,
    ) -> None:
        """`processes` is the number of the server's API processes. Raises ConfigError: a public key cannot be used."""
        self._client, self._models, self._state = client, models, state
        self._config = config or InduceKVConfig()
        self._stop = stop or EngineStop(client)
        self._reader = BundleReader(client, backbone, state, self._config)
        self._processes = range(processes)
        self._metrics = RegistryMetrics(is_first=state.process == 0)
        self._names = Names(models, self._metrics, self._on_idle)
        self._seen = -1  # the state's change number that the names follow
        self._following, self._turn = asyncio.Lock(), asyncio.Lock()
        self._waiting = 0  # changes, the running one included
        self._strangers: deque[float] = deque(maxlen=STRANGERS)  # when they were refused and recorded
        self._unrecorded = 0
        self._limit: asyncio.Timeout | None = None  # of the running change
        self._draining: frozenset[str] = frozenset()  # what this process has not left
        self._behind: str | None = None  # why this process cannot follow the state
        self.background: set[asyncio.Task[Any]] = set()
        self._uses: dict[tuple[str, str], float] = {}  # not written down yet: by name and fact, when it answered
        self._noted_at = 0.0
        self.following: asyncio.Task[None] | None = None

    # ---- start ---------------------------------------------------------------------------------------------------

    async def start(self, run: str, admin_key: str | None = None) -> None:
        """The first process loads the bundles of the settings, and those that an earlier server with this state left.

        A name that was changed while that server ran keeps its version, whatever the settings say. If that version is
        damaged, the name is not served, and keeps what is recorded of it. The other processes wait for the first one.

        Args:
            run: the server's, the same in all processes.
            admin_key: how the audit chain names the admin's key.

        Raises:
            InduceKVError: a bundle cannot be loaded.
        """
        if self._state.process == 0:
            await asyncio.to_thread(self._state.begin, {"version": __version__, "admin_key": admin_key})
            await self._restore()
            for name, path in self._config.bundles.items():
                records = self._state.records(name)
                if name in self._names and records[0].by != START:
                    digest = records[0].digest
                    logger.warning("memory bundle %r stays at digest %s of the state file, not %s", name, digest, path)
                elif all(record.by == START for record in records[:1]):
                    await self.load(name, path)
            await asyncio.to_thread(self._state.begun, run)
        while not await asyncio.to_thread(self._state.has_begun, run):
            await asyncio.sleep(POLL_S)
        await self.follow()
        self.following = asyncio.get_running_loop().create_task(self._keep_following())

    async def _restore(self) -> None:
        for name in await asyncio.to_thread(lambda: self._state.names):
            (served, *_) = self._state.records(name)
            if served.by != START:
                await self._restore_if_whole(name, served)
            elif name not in self._config.bundles:
                await asyncio.to_thread(self._state.drop, name, (), START)

    async def _restore_if_whole(self, name: str, record: VersionRecord) -> None:
        """Serve the version that the state has of a name, as it was; one that is gone or damaged is logged, no more."""
        try:
            async with self._changing("restore", name, START):
                self._check_name(name, replace=False)
                await self._serve_kept("restore", record)
        except BundleError:
            if await self._reader.is_whole(record):
                raise  # it is refused for what it is

    async def _keep_following(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.see_changes()

    async def see_changes(self) -> None:
        """`follow`, before a request begins. If that fails, nobody knows what is current, and no bundle is served."""
        try:
            await self.follow()
        except InduceKVError as error:
            if self._behind is None:
                logger.error("no bundle is served until the state can be read: %s", error)
            self._behind = str(error)
        else:
            self._behind = None

    async def follow(self) -> None:
        """Serve what the state has now, or has later. Raises ConfigError: it cannot be read.

        Once is enough, whatever changes meanwhile: with traces and audited answers that may be at every moment.
        """
        if self._state.change_number() == self._seen:
            return
        async with self._following:
            if (number := self._state.change_number()) == self._seen:
                return
            snapshot = await asyncio.to_thread(self._state.snapshot)
            self._names.follow(snapshot)
            self._seen, self._draining = number, snapshot.draining
            for digest in snapshot.draining:
                self._on_idle(digest)

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
    ) -> MemoryBundleCard:
        """Check a bundle, make it resident on every rank and point `name` to it.

        Loading the content that `name` already stands for changes nothing. An error changes nothing either.

        Args:
            replace: `name` may stand for another version.
            expected_digest: `name` must stand for this version now.
            who: asks for it, for the log.
            access: the folders that the bundle and its adapters must lie in; None for any.

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
        async with self._changing("load", name, who, expected_digest):
            self._check_name(name, replace or expected_digest is not None)
            if access is None:
                source = os.path.abspath(os.path.expanduser(path))
            else:
                source = await asyncio.to_thread(access.inside, path, f"bundle {name!r}")
            checked = await self._reader.read(name, source, access)
            memory = checked.memory
            record = VersionRecord(name, memory.digest, memory.metadata.parent_digest, datetime.now(UTC), who, source)
            return await self._serve("load", record, checked)

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
        async with self._changing("rollback", name, who, expected_digest):
            self._names.of(name)
            _, *earlier = self._names.records[name]
            wanted = earlier[:1] if digest is None else [each for each in earlier if each.digest == digest]
            if not wanted:
                kept = ", ".join(each.digest for each in earlier) or "none"
                found = "no earlier version" if digest is None else f"no earlier version of digest {digest:.100}"
                raise ConfigError(f"memory bundle {name!r} has {found}; kept are: {kept}")
            return await self._serve_kept(
                "rollback", dataclasses.replace(wanted[0], loaded_at=datetime.now(UTC), by=who)
            )

    async def forget(
        self, name: str, *, digest: str | None = None, expected_digest: str | None = None, who: str = START
    ) -> ForgottenVersions:
        """Drop the earlier versions of a name, or that of `digest`; a rollback to them is no longer possible.

        Raises:
            UnknownBundle: no bundle of this name is loaded.
            ConfigError: no such version is kept, the name stands for it, or the change cannot be recorded.
            VersionConflict, TooManyChanges, RetryableRequestError: as for `load`.
        """
        async with self._changing("forget", name, who, expected_digest):
            served = self._names.of(name).memory.digest
            _, *earlier = self._names.records[name]
            if digest == served:
                raise ConfigError(f"memory bundle {name!r} stands for the version {digest}: load another one first")
            gone = [each.digest for each in earlier if digest in (None, each.digest)]
            if digest is not None and not gone:
                kept = ", ".join(each.digest for each in earlier) or "none"
                raise ConfigError(f"memory bundle {name!r} keeps no version {digest:.100}; kept are: {kept}")
            in_use = await self._record(self._state.forget, name, gone, who)
            logger.info("memory bundle %r: versions %s forgotten by %s", name, ", ".join(gone) or "none", who)
            return ForgottenVersions(name=name, digest=served, forgotten=gone, in_use=in_use)

    async def change_facts(
        self,
        change: Literal["teach", "forget_facts"],
        name: str,
        make: Callable[[Bundle | None, FactReader], Bundle],
        *,
        expected_digest: str | None = None,
        who: str = START,
    ) -> MemoryBundleCard:
        """Let a name stand for the next version of its bundle, with other facts.

        Args:
            make: the next version from the served one, which is None if "teach" is to make the first one.

        Raises:
            InduceKVError: what `make` raises; or as for `load`.
        """
        async with self._changing(change, name, who, expected_digest):
            self._check_name(name, replace=True)
            served = self._names.records[name][0] if name in self._names else None
            checked = await self._reader.changed(served, make)
            memory = checked.memory
            try:
                parent = memory.metadata.parent_digest
                record = VersionRecord(name, memory.digest, parent, datetime.now(UTC), who, TAUGHT)
                return await self._serve(change, record, checked)
            finally:
                Path(memory.path).unlink(missing_ok=True)

    async def unload(self, name: str, *, expected_digest: str | None = None, who: str = START) -> str:
        """Remove a name with its versions and return its digest; running requests keep the version until they end.

        Raises:
            UnknownBundle: no bundle of this name is loaded.
            VersionConflict: the name does not stand for `expected_digest`.
            ConfigError: the change cannot be recorded.
            TooManyChanges: too many changes wait.
            RetryableRequestError: the server is shutting down.
        """
        async with self._changing("unload", name, who, expected_digest):
            version = self._names.of(name)
            digest = version.memory.digest
            await self._record(self._state.drop, name, self._processes, who)
            logger.info(
                "memory bundle %r unloaded by %s: digest %s, used by %d requests", name, who, digest, version.active
            )
            return digest

    async def _serve_kept(self, change: str, record: VersionRecord) -> MemoryBundleCard:
        """`_serve`, with a version that the state has."""
        async with self._reader.version(record) as checked:
            return await self._serve(change, record, checked)

    async def _serve(self, change: str, record: VersionRecord, checked: Checked) -> MemoryBundleCard:
        """Make a checked bundle resident, record it, and log it."""
        began, memory = time.monotonic(), checked.memory
        name, digest = record.name, memory.digest
        self._check_adapters(name, memory)
        before = self._names.of(name).memory.digest if name in self._names else None
        version = self._names.versions.get(digest)
        try:
            resident_bytes = version.resident_bytes if version else await engines.load(self._client, memory)
            event = "replace" if before is not None and change == "load" else change
            await self._record(
                self._state.point,
                *(record, memory, resident_bytes, checked.bundle, self._config.keep_versions, self._processes, event),
            )
        except BaseException as error:
            if version is None:
                unloading = self.in_background(engines.unload(self._client, memory, self._adapters()))
                if not isinstance(error, asyncio.CancelledError):  # out of time
                    await unloading
            raise
        logger.info(
            "memory bundle %r %s by %s in %.2f s: digest %s, %d entries, %d bytes a rank, from %s",
            name,
            _DONE[event] if before is None else f"{_DONE[event]} (digest before {before})",
            *(record.by, time.monotonic() - began, digest, memory.num_entries, resident_bytes, record.source),
        )
        if num_expired := memory.num_entries - len(memory.alive()):
            entries = memory.num_entries
            logger.warning(
                "memory bundle %r: %d of %d entries have expired and are not used", name, num_expired, entries
            )
        return self._names.card(name, is_admin=True)

    async def _record(self, change: Callable[..., T], *arguments: Any) -> T:
        """Record a change, which takes effect with that. Its time limit does not end it any more."""
        assert self._limit is not None
        if self._limit.expired():
            raise TimeoutError
        self._limit.reschedule(None)
        result = await asyncio.to_thread(change, *arguments)
        await self.follow()
        return result

    @contextlib.asynccontextmanager
    async def _changing(
        self, change: str, name: str, who: str, expected_digest: str | None = None
    ) -> AsyncIterator[None]:
        """One change, alone and within the time that it may take; a refusal is told, and leaves nothing behind."""
        limit = self._config.load_timeout_s
        async with self._told(change, name, who):
            with self._metrics.change(change), self._stop.running():
                try:
                    async with asyncio.timeout(limit) as timer, self._alone():
                        self._limit = timer
                        self._check_expected(
                            name, expected_digest, must_exist=change not in ("load", "restore", "teach")
                        )
                        yield
                except TimeoutError as error:
                    reason = f"{change} of {name!r} took longer than {limit:g} s; nothing has changed"
                    raise LoadTimeout(reason) from error

    @contextlib.asynccontextmanager
    async def _told(self, change: str, name: str, who: str) -> AsyncIterator[None]:
        """A change is shown while it waits and runs; if it is refused, that is shown, logged and recorded."""
        began, loading, is_shown, failure = time.monotonic(), change in LOADS, False, None
        try:
            with self._waiting_turn():
                await asyncio.to_thread(self._state.attempt, name, loading=loading)
                is_shown = True
                yield
        except BaseException as error:
            failure = error
            raise
        finally:
            reason = None if failure is None else " ".join(str(failure).split()) or repr(failure)
            if is_shown:
                is_of_the_bundle = isinstance(failure, InduceKVError) and not isinstance(failure, PASSING)
                ended = partial(self._state.attempted, name, loading=loading, change=change, reason=reason)
                with contextlib.suppress(InduceKVError):  # the disk is full
                    await asyncio.to_thread(ended, says_something=failure is None or is_of_the_bundle)
            if isinstance(failure, Exception):
                facts = (change, name, who, time.monotonic() - began, reason)
                logger.warning("%s of memory bundle %.200r by %s refused after %.2f s: %.1000s", *facts)
                await self._note("refusal", change=change, name=f"{name:.200}", by=who, reason=f"{reason:.1000}")

    @contextlib.contextmanager
    def _waiting_turn(self) -> Iterator[None]:
        if self._waiting > self._config.max_waiting_changes:
            raise TooManyChanges(f"{self._waiting} changes of bundles are under way; try again later")
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """One change at a time, in all API processes; what the others have changed is there."""
        async with self._turn:
            while not self._state.begin_change():
                await asyncio.sleep(TURN_S)
            try:
                await self.follow()
                yield
            finally:
                self._state.end_change()

    async def note_stranger(self, route: str, host: str, reason: str) -> None:
        """Record that somebody without the admin key asked for a change. Anybody can: only the first few a minute."""
        now = time.monotonic()
        if len(self._strangers) == STRANGERS and now - self._strangers[0] < STRANGERS_S:
            self._unrecorded += 1
            return
        self._strangers.append(now)
        unrecorded, self._unrecorded = self._unrecorded, 0
        await self._note(
            "refusal", change=route, name=None, by=f"unknown at {host}", reason=reason, unrecorded_before=unrecorded
        )

    async def _note(self, event: str, **facts: Any) -> None:
        """Record what has happened already."""
        try:
            await asyncio.to_thread(self._state.note, event, facts)
        except InduceKVError as error:
            logger.error("the event %r could not be recorded: %s", event, error)

    # ---- checks --------------------------------------------------------------------------------------------------

    def _check_name(self, name: str, replace: bool) -> None:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"a bundle's name must be at most 128 letters, digits or . _ : / @ -, and begin with a letter or a "
                f"digit; found {name!r}"
            )
        if name.lower() in PART_KINDS:
            raise ConfigError(f"the name {name!r} is taken: vLLM reads it as a kind of message content")
        if PIN.fullmatch(name):
            raise ConfigError(f"the name {name!r} is taken: requests that end so are pinned to a version")
        if self._models.is_base_model(name):
            raise ConfigError(f"the name {name!r} is taken by the served model")
        if name in self._models.lora_requests and name not in self._names:
            raise ConfigError(f"the name {name!r} is taken by a LoRA adapter")
        if name in self._names and not replace:
            raise ConfigError(f'a memory bundle {name!r} is loaded already; set "replace" to true to replace it')
        if name not in self._names and len(self._names.records) >= self._config.max_bundles:
            raise CapacityError(f"{len(self._names.records)} bundles are loaded, and no more are allowed (max_bundles)")

    def _check_expected(self, name: str, expected: str | None, *, must_exist: bool) -> None:
        if must_exist:
            self._names.of(name)
        found = self._names.of(name).memory.digest if name in self._names else "no bundle"
        if expected is not None and found != expected:
            raise VersionConflict(f"memory bundle {name!r}: expected digest {expected:.100}, found {found}")

    def _check_adapters(self, name: str, memory: Memory) -> None:
        """Raises UnsupportedModel: its adapters cannot be served here."""
        config, records = self._client.vllm_config.lora_config, memory.metadata.task_adapters
        groups = groups_adapters(self._client.vllm_config)
        if memory.adapter is not None:
            self._names.adapter(name, memory.adapter)
        elif config is not None and not groups and not records:
            raise UnsupportedModel(
                f"the server runs with LoRA, but bundle {name!r} names no adapter: its keys and payloads were made "
                "without one"
            )
        if not records:
            return
        if config is None:
            raise UnsupportedModel(f"bundle {name!r} sends tasks to LoRA adapters: start the server with --enable-lora")
        if not groups:
            raise UnsupportedModel(
                f"bundle {name!r} sends tasks to LoRA adapters, which vLLM on CPUs mixes up with other requests of a "
                "batch (vllm-project/vllm#48421) unless the server runs with --enforce-eager"
            )
        for record in records:
            if record.rank > config.max_lora_rank:
                raise UnsupportedModel(
                    f"bundle {name!r}: the adapter of task {record.task!r} has rank {record.rank}, "
                    f"the server's --max-lora-rank is {config.max_lora_rank}"
                )

    # ---- requests ------------------------------------------------------------------------------------------------

    def lease(self, model: str) -> AbstractContextManager[Lease]:
        """`Names.lease`: keep the current version of a name resident until the context ends.

        Raises:
            RetryableRequestError: the state cannot be read.
        """
        if self._behind is not None:
            raise RetryableRequestError(self._behind)
        return self._names.lease(model)

    def _on_idle(self, digest: str) -> None:
        """No request of this process uses a version, perhaps."""
        version = self._names.versions.get(digest)
        if digest in self._draining and version is not None and not version.active:
            self._draining -= {digest}
            self.in_background(self._leave(digest, version.memory))

    async def _leave(self, digest: str, memory: Memory) -> None:
        """This process does not use a version any more. The last one unloads it."""
        if not await asyncio.to_thread(self._state.leave, digest):
            return
        async with self._alone():  # it may be loaded again meanwhile
            if not await asyncio.to_thread(self._state.release, digest):
                return
            await self.follow()
            try:
                await engines.unload(self._client, memory, self._adapters())
                is_erased = await engines.wait_until_erased(self._client, digest, ERASE_S)
            except Exception as error:  # the engine is gone, and the bundle with it
                logger.warning("could not release the memory of digest %s: %r", digest, error)
            else:
                logger.info("memory of digest %s released: no name and no request uses it", digest)
                await self._note("release", digest=digest, erased=is_erased)

    def _adapters(self) -> list[Any]:
        """Of all tasks of all versions that are resident."""
        return [each for version in self._names.versions.values() for each in task_adapters(version.memory).values()]

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

    def shown(self, *, is_admin: bool = False) -> MemoryBundleList:
        """What is loaded; requests are those of this API process."""
        draining = [version for version in self._names.versions.values() if not version.names]
        return MemoryBundleList(
            data=[self._names.card(name, is_admin) for name in self._names.records],
            draining=[DrainingMemory(digest=v.memory.digest, active_requests=v.active) for v in draining],
        )

    def metadata(self, name: str) -> BundleMetadata:
        """Of the version that a name stands for. Raises UnknownBundle: no bundle of this name is loaded."""
        return self._names.of(name).memory.metadata

    async def detail(self, name: str, *, is_admin: bool = False) -> MemoryBundleDetail:
        """What is known of a name.

        Raises:
            UnknownBundle: no bundle of this name is loaded, on its way or draining, and none has failed lately.
        """
        attempt = await asyncio.to_thread(self._state.attempt_of, name)
        left = self._names.versions.get(attempt.left_digest or "")
        state: BundleState
        if name in self._names:
            state = "ready"
        elif attempt.loading:
            state = "loading"
        elif attempt.reason is not None:
            state = "failed"
        elif left is not None and not left.names:
            state = "draining"
        else:
            raise UnknownBundle(f"no memory bundle {name!r:.200} is loaded")
        failure = None
        if attempt.change is not None and attempt.at is not None:
            reason = attempt.reason if is_admin else None
            failure = MemoryFailure(change=attempt.change, reason=reason, at=attempt.at)
        return MemoryBundleDetail(
            name=name,
            state=state,
            loading=attempt.loading,
            failure=failure,
            bundle=self._names.card(name, is_admin) if name in self._names else None,
        )

    async def record_answer(self, request_id: str, owner: str, trace: Mapping[str, Any]) -> None:
        """Record an answer that is about to begin.

        Args:
            owner: the digest of the key that asked; empty without one.
            trace: see `inducekv_vllm.engine.trace.describe`.

        Raises:
            ConfigError, CapacityError: it cannot be recorded.
        """
        facts = {
            "request": request_id,
            "by": owner[:KEY_DIGITS] or None,
            "name": trace["bundle"],
            "digest": trace["digest"],
            "task": trace["gate"] and trace["gate"]["task"],
            "entries": {entry["id"]: entry["weight"] for entry in (*trace["entries"], *trace["facts"])},
        }
        await asyncio.to_thread(self._state.note, "answer", facts)

    def note_facts(self, name: str, facts: Sequence[str]) -> None:
        """Facts are about to answer. It is written down once a minute, and before a name is taught more."""
        now = time.time()
        self._uses.update(dict.fromkeys(((name, fact) for fact in facts), now))
        if now - self._noted_at >= NOTED_S:
            self._noted_at = now
            self.in_background(self._note_uses())

    async def _note_uses(self) -> None:
        uses, self._uses = self._uses, {}
        if not uses:
            return
        try:
            await asyncio.to_thread(self._state.note_uses, uses)
        except InduceKVError as error:
            logger.warning("which facts have answered cannot be noted: %s", error)

    async def uses(self, name: str) -> dict[str, float]:
        """When the facts of a name have last answered, in seconds since the epoch. Raises ConfigError."""
        await self._note_uses()
        return await asyncio.to_thread(self._state.uses, name)

    async def put_trace(self, owner: str, cache_salt: str | None, request_id: str, trace: dict[str, Any]) -> None:
        """Keep what a request was answered with."""
        await asyncio.to_thread(self._state.put_trace, owner, cache_salt, request_id, trace)

    async def traces(self, owner: str, cache_salt: str | None, response_id: str) -> list[dict[str, Any]]:
        """The traces of a response of any API process."""
        return await asyncio.to_thread(self._state.traces, owner, cache_salt, response_id)
