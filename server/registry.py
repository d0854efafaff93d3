"""The loaded bundles: their names, their versions and the requests that use them.

A *version* is one content (digest). It is resident on the workers once, under any number of names. A request leases the
version of its name when it begins and keeps it until it ends. A version without names is released with its last lease.
A server has one registry. Its other API processes, if it has any, follow it (`followers.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.renderers.chat_utils import MM_PARSER_MAP

from inducekv_vllm.bundle import AdapterRecord, BackboneFingerprint, read_bundle, read_public_key, require_signature
from inducekv_vllm.bundle.adapters import read_adapter
from inducekv_vllm.engine.memory import Memory
from inducekv_vllm.engine.memory_engine import Lease
from inducekv_vllm.engine.stopping import EngineStop
from inducekv_vllm.errors import (
    BundleError,
    CapacityError,
    ConfigError,
    LoadTimeout,
    TooManyChanges,
    UnknownBundle,
    UnsupportedModel,
    VersionConflict,
)
from inducekv_vllm.host.config import InduceKVConfig
from inducekv_vllm.host.logs import logger_of
from inducekv_vllm.workers.cpu_lora import groups_adapters

from .access import Access, opened
from .audit import AuditLog
from .followers import Followers
from .history import START, History, VersionRecord
from .metrics import RegistryMetrics
from .named import NamedVersions
from .peers import Handler
from .pins import PIN
from .readiness import Readiness
from .reading import read_in_thread
from .residency import EngineMemory, adapter_folder
from .schemas import (
    NAME_PATTERN,
    BundleState,
    DrainingMemory,
    ForgottenVersions,
    MemoryBundleCard,
    MemoryBundleDetail,
    MemoryBundleList,
)
from .version import Version

logger = logger_of(__name__)

_NAME = re.compile(NAME_PATTERN)
# vLLM applies an adapter named after a kind of message part ("image", "text") to every request with such a part.
PART_KINDS = frozenset(kind.split("_")[0] for kind in MM_PARSER_MAP) | {"audio", "file", "image", "text", "video"}
# A request that ends by a stop string ends in this process shortly before it ends in the engine.
RELEASE_DELAY_S = 0.05
ERASE_S = 5.0  # changes wait so long for the memory of a version to be overwritten
_CHANGED = {"loaded": "replaced"}  # what a change is called where a name stood for another version
_NOBODY: Final[Mapping[str, int]] = {}
# What changes are called in the audit log.
_EVENTS = {"loaded": "load", "replaced": "replace", "rolled back": "rollback", "restored": "restore"}


class BundleRegistry:
    """See the module docstring. It belongs to the server's event loop; changes happen one at a time."""

    def __init__(
        self,
        client: EngineClient,
        models: OpenAIServingModels,
        backbone: BackboneFingerprint,
        config: InduceKVConfig | None = None,
        stop: EngineStop | None = None,
        audit: AuditLog | None = None,
        followers: Followers | None = None,
    ) -> None:
        """`followers` are the server's other API processes.

        Raises:
            ConfigError: the state folder or a public key cannot be used.
        """
        self._client = client
        self._config = config or InduceKVConfig()
        self._audit = audit or AuditLog()
        self._signers = [read_public_key(path) for path in self._config.require_signature]
        self._history = History(self._config.state, self._config.keep_versions)
        self._stop = stop or EngineStop(client)
        self._followers = followers or Followers()
        self._models = models
        self._engine = EngineMemory(client, models)
        self._backbone = backbone
        self._metrics = RegistryMetrics()
        self._names = NamedVersions(models, self._metrics, self._release_if_unused)
        self._change = asyncio.Lock()
        self._limit: asyncio.Timeout | None = None  # of the running change
        self._known: set[str] = set()  # versions that are loaded or kept
        self.on_gone: Callable[[str], None] = lambda digest: None  # called for a version that is neither any more
        self.own_traces: Callable[..., list[dict[str, Any]]] = lambda *_: []  # of answers of this process
        self._waiting = 0  # changes, the running one included
        self._readiness = Readiness()

    # ---- changes -----------------------------------------------------------------------------------------------

    async def start(self, handlers: Callable[[int], Mapping[str, Handler]] = lambda rank: {}) -> None:
        """Load the bundles of the settings, and those that an earlier server with this state folder has left.

        A name that was changed while that server ran keeps its version, whatever the settings say. If the file of that
        version is gone or damaged, the name is not served, and keeps what is recorded of it. The server's other API
        processes have all of them too when this returns.

        Args:
            handlers: what another API process may call here, by its rank.

        Raises:
            InduceKVError: a bundle cannot be loaded.
        """
        for name in self._history.names:
            (served, *_) = self._history.of(name)
            if served.by == START:
                if name not in self._config.bundles:
                    await self._audit.change("unload", name=name, digest=served.digest, by=START)
                    self._history.drop(name)
            else:
                await self._restore_if_whole(name, served)
        for name, path in self._config.bundles.items():
            if name in self._names:
                digest = self._names.of(name).memory.digest
                logger.warning("memory bundle %r stays at digest %s of the state folder, not %s", name, digest, path)
            elif all(served.by == START for served in self._history.of(name)[:1]):
                await self.load(name, path)
        await self._followers.meet(self._client, handlers)
        for name, version in self._names.by_name.items():
            await self._followers.prepare(name, version, version.memory.path)
            handle_id = self._models.lora_requests[name].lora_int_id
            self._followers.point(name, version, version.names[name], handle_id)
        await self._followers.begin()

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
        async with self._timed("load", name, who):
            began = time.monotonic()
            self._check_expected(name, expected_digest)
            replace = replace or expected_digest is not None
            self._check_name(name, replace)
            if access is None:
                source = os.path.abspath(os.path.expanduser(path))
            else:
                source = await asyncio.to_thread(access.inside, path, f"bundle {name!r}")
            memory = await read_in_thread(self._client, self._read_checked, name, source, access)
            return await self._serve(name, memory, source, replace, who, "loaded", began)

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
        async with self._timed("rollback", name, who):
            began = time.monotonic()
            self._names.of(name)
            self._check_expected(name, expected_digest)
            _, *earlier = self._history.of(name)
            wanted = earlier[:1] if digest is None else [each for each in earlier if each.digest == digest]
            if not wanted:
                kept = ", ".join(each.digest for each in earlier) or "none"
                found = "no earlier version" if digest is None else f"no earlier version of digest {digest:.100}"
                raise ConfigError(f"memory bundle {name!r} has {found}; kept are: {kept}")
            memory = await read_in_thread(self._client, self._read_version, name, wanted[0])
            return await self._serve(name, memory, wanted[0].source, True, who, "rolled back", began)

    async def _restore_if_whole(self, name: str, record: VersionRecord) -> None:
        """`_restore`; a file that is gone or damaged is a refused change in the log, and no more."""
        try:
            await self._restore(name, record)
        except BundleError:
            if await asyncio.to_thread(self._history.is_whole, record):
                raise  # it is refused for what it is

    async def _restore(self, name: str, record: VersionRecord) -> None:
        """Serve the version that the state folder has of a name, as it was."""
        async with self._timed("restore", name, START):
            began = time.monotonic()
            self._check_name(name, replace=False)
            memory = await read_in_thread(self._client, self._read_version, name, record)
            await self._serve(name, memory, record.source, False, START, "restored", began)

    async def _serve(
        self, name: str, memory: Memory, source: str, replace: bool, who: str, done: str, began: float
    ) -> MemoryBundleCard:
        """Make a checked memory resident, record it, point `name` to it and log it."""
        version = await self._resident(name, memory)
        previous = self._names.by_name.get(name)
        try:
            await self._followers.prepare(name, version, memory.path)
            self._check_name(name, replace)
            record = self._history.record(memory.digest, memory.metadata.parent_digest, who, source, memory.path)
            await self._record_change(name, memory, source, who, done)
            async with self._taking_effect():
                # Without an await: an adapter may have taken the name before.
                self._check_name(name, replace)
                self._history.push(name, record)
                self._names.versions[memory.digest] = version
                handle_id = self._models.lora_id_counter.inc(1)
                self._names.point(name, version, source, handle_id)
                self._followers.point(name, version, source, handle_id)
        except BaseException:
            self._followers.discard(memory.digest)
            self._names.versions.setdefault(memory.digest, version)
            self._release_if_unused(version)
            raise
        logger.info(
            "memory bundle %r %s by %s in %.2f s: digest %s, %d entries, %d bytes a rank, from %s",
            name,
            done if previous is None else f"{_CHANGED.get(done, done)} (digest before {previous.memory.digest})",
            who,
            time.monotonic() - began,
            memory.digest,
            memory.num_entries,
            version.resident_bytes,
            source,
        )
        if num_expired := memory.num_entries - len(memory.alive()):
            logger.warning(
                "memory bundle %r: %d of %d entries have expired and are not used",
                name,
                num_expired,
                memory.num_entries,
            )
        self._drop_what_is_gone()
        return self._card(name, is_admin=True)

    async def _resident(self, name: str, memory: Memory) -> Version:
        """The version of this content, made resident if it is not."""
        self._check_adapter(name, memory)
        version = self._names.versions.get(memory.digest)
        if version is None:
            resident_bytes = await self._engine.load(memory)
            version = Version(memory, resident_bytes, await self._engine.load_adapters(name, memory))
        return version

    @contextlib.asynccontextmanager
    async def _taking_effect(self) -> AsyncIterator[None]:
        """In the block, which must not wait, a change takes effect: no other process begins with a request meanwhile,
        and the change's time limit does not end it any more.
        """
        async with self._followers.paused():
            assert self._limit is not None
            if self._limit.expired():
                raise TimeoutError
            self._limit.reschedule(None)
            yield

    async def _record_change(self, name: str, memory: Memory, source: str, who: str, done: str) -> None:
        before = self._names.of(name).memory.digest if name in self._names else None
        await self._audit.change(
            _EVENTS[done] if before is None else _EVENTS[_CHANGED.get(done, done)],
            name=name,
            digest=memory.digest,
            parent=memory.metadata.parent_digest,
            before=before,
            by=who,
            source=source,
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
        async with self._timed("forget", name, who):
            version = self._names.of(name)
            self._check_expected(name, expected_digest)
            _, *earlier = self._history.of(name)
            if digest == version.memory.digest:
                raise ConfigError(f"memory bundle {name!r} stands for the version {digest}: load another one first")
            gone = [each.digest for each in earlier if digest in (None, each.digest)]
            if digest is not None and not gone:
                kept = ", ".join(each.digest for each in earlier) or "none"
                raise ConfigError(f"memory bundle {name!r} keeps no version {digest:.100}; kept are: {kept}")
            await self._audit.change("forget", name=name, digests=gone, served=version.memory.digest, by=who)
            async with self._taking_effect():
                self._history.forget(name, gone)
                self._drop_what_is_gone()
            in_use = [each for each in gone if each in self._history.digests or each in self._names.versions]
            logger.info("memory bundle %r: versions %s forgotten by %s", name, ", ".join(gone) or "none", who)
            return ForgottenVersions(name=name, digest=version.memory.digest, forgotten=gone, in_use=in_use)

    def _drop_what_is_gone(self) -> None:
        """Drop what is left of versions that are neither loaded nor kept."""
        there = self._history.digests | self._names.versions.keys()
        gone, self._known = self._known - there, set(there)
        for digest in gone:
            self.on_gone(digest)
            self._followers.gone(digest)

    async def unload(self, name: str, *, expected_digest: str | None = None, who: str = START) -> str:
        """Remove a name with its versions and return its digest; running requests keep the version until they end.

        Raises:
            UnknownBundle: no bundle of this name is loaded.
            VersionConflict: the name does not stand for `expected_digest`.
            ConfigError: the change cannot be recorded.
            TooManyChanges: too many changes wait.
            RetryableRequestError: the server is shutting down.
        """
        async with self._timed("unload", name, who):
            digest = self._names.of(name).memory.digest
            self._check_expected(name, expected_digest)
            await self._audit.change("unload", name=name, digest=digest, by=who)
            async with self._taking_effect():
                self._history.drop(name)
                self._readiness.unloaded(name, digest)
                active = self._names.remove(name).active
                self._followers.remove(name)
            logger.info("memory bundle %r unloaded by %s: digest %s, used by %d requests", name, who, digest, active)
            self._drop_what_is_gone()
            return digest

    @contextlib.asynccontextmanager
    async def _timed(self, change: str, name: str, who: str) -> AsyncIterator[None]:
        """One change, alone and within the time that it may take; a refusal is logged, and leaves nothing behind."""
        limit = self._config.load_timeout_s
        with self._logged(change, name, who), self._metrics.change(change), self._readiness.change(change, name):
            try:
                async with asyncio.timeout(limit) as timer, self._changing():
                    self._limit = timer
                    try:
                        yield
                    except BaseException:
                        self._history.sweep()
                        raise
            except TimeoutError as error:
                raise LoadTimeout(f"{change} of {name!r} took longer than {limit:g} s; nothing has changed") from error

    @contextlib.contextmanager
    def _logged(self, change: str, name: str, who: str) -> Iterator[None]:
        """Log a change that is refused."""
        began = time.monotonic()
        try:
            yield
        except Exception as error:
            seconds, reason = time.monotonic() - began, " ".join(str(error).split()) or repr(error)
            logger.warning(
                "%s of memory bundle %.200r by %s refused after %.2f s: %.1000s", change, name, who, seconds, reason
            )
            self._audit.refusal(change, name, who, reason)
            raise

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """One change at a time; a shutdown with a time-out waits for it.

        Raises:
            TooManyChanges: as many as may wait are waiting.
        """
        if self._waiting > self._config.max_waiting_changes:
            raise TooManyChanges(f"{self._waiting} changes of bundles are under way; try again later")
        with self._stop.running():
            self._waiting += 1
            try:
                async with self._change:
                    yield
            finally:
                self._waiting -= 1

    def _read_version(self, name: str, record: VersionRecord) -> Memory:
        """Read a version that is kept; runs in a thread. Raises BundleError: its file holds something else now."""
        path = str(self._history.path(record))
        memory = self._read_checked(name, path, None)
        if memory.digest != record.digest:
            raise BundleError(
                f"bundle {name!r} ({path}): the file has changed: expected digest {record.digest}, found "
                f"{memory.digest}; a server with a state folder keeps copies"
            )
        return memory

    def _read(self, name: str, path: str, access: Access | None) -> Memory:
        """Read and check a file; runs in a thread. With `access`, `path` is what it has found inside."""
        with contextlib.nullcontext(path) if access is None else opened(path, f"bundle {name!r}") as file:
            return self._read_opened(name, path, file)

    def _read_opened(self, name: str, path: str, file: str) -> Memory:
        """`file` is what leads to the bundle now, `path` what will later."""
        source = f"bundle {name!r} ({path})"
        bundle = read_bundle(
            file,
            backbone=self._backbone,
            max_bytes=self._config.max_bundle_bytes,
            name=source,
        )
        try:
            if self._signers:
                # Of what was read, not of the file: it may be another one by now. The workers compare the digest.
                require_signature(bundle.signature, bundle.digest, self._signers, source)
            kept = self._history.store(bundle, path)
            return dataclasses.replace(Memory.from_bundle(bundle, file), path=kept)
        except OSError as error:
            raise BundleError(f"{path}: the file was removed while it was loaded") from error

    def _read_checked(self, name: str, path: str, access: Access | None) -> Memory:
        """`_read`, and the adapters of its tasks are those that the bundle was made with; runs in a thread."""
        memory = self._read(name, path, access)
        for record in memory.metadata.task_adapters:
            _check_adapter_files(name, adapter_folder(memory, record), record, access)
        return memory

    # ---- checks ------------------------------------------------------------------------------------------------

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
        if name not in self._names and len(self._names.by_name) >= self._config.max_bundles:
            raise CapacityError(f"{len(self._names.by_name)} bundles are loaded, and no more are allowed (max_bundles)")

    def _check_expected(self, name: str, expected: str | None) -> None:
        found = self._names.of(name).memory.digest if name in self._names else "no bundle"
        if expected is not None and found != expected:
            raise VersionConflict(f"memory bundle {name!r}: expected digest {expected:.100}, found {found}")

    def _check_adapter(self, name: str, memory: Memory) -> None:
        lora_on = self._client.vllm_config.lora_config is not None
        if memory.metadata.task_adapters:
            self._check_task_adapters(name, memory)
        elif memory.adapter is None and lora_on and not groups_adapters(self._client.vllm_config):
            raise UnsupportedModel(
                f"the server runs with LoRA, but bundle {name!r} names no adapter: its keys and payloads were made "
                "without one"
            )
        if memory.adapter is not None:
            self._names.adapter(name, memory.adapter)

    def _check_task_adapters(self, name: str, memory: Memory) -> None:
        config = self._client.vllm_config.lora_config
        if config is None:
            raise UnsupportedModel(f"bundle {name!r} sends tasks to LoRA adapters: start the server with --enable-lora")
        if not groups_adapters(self._client.vllm_config):
            raise UnsupportedModel(
                f"bundle {name!r} sends tasks to LoRA adapters, which vLLM on CPUs mixes up with other requests of a "
                "batch (vllm-project/vllm#48421) unless the server runs with --enforce-eager"
            )
        for record in memory.metadata.task_adapters:
            if record.rank > config.max_lora_rank:
                raise UnsupportedModel(
                    f"bundle {name!r}: the adapter of task {record.task!r} has rank {record.rank}, "
                    f"the server's --max-lora-rank is {config.max_lora_rank}"
                )

    # ---- requests ----------------------------------------------------------------------------------------------

    def lease(self, model: str) -> AbstractContextManager[Lease]:
        """`NamedVersions.lease`: keep the current version of a name resident until the context ends."""
        return self._names.lease(model)

    async def may_begin(self) -> None:
        """Return at once: the other API processes wait for this one, not it for them."""

    # ---- release -----------------------------------------------------------------------------------------------

    def _release_if_unused(self, version: Version) -> None:
        if not version.names:
            self._metrics.holds(self._names.versions.values())
        if version.is_unused:
            self._engine.in_background(self._release(version))

    def released_by(self, rank: int, digest: str) -> None:
        """The API process of this rank does not have a version any more."""
        if (version := self._names.versions.get(digest)) is not None:
            version.holders.discard(rank)
            self._release_if_unused(version)

    async def _release(self, version: Version) -> None:
        await asyncio.sleep(RELEASE_DELAY_S)
        async with self._change:
            digest = version.memory.digest
            if not version.is_unused or self._names.versions.get(digest) is not version:
                return  # loaded again in the meantime, or released by another task
            del self._names.versions[digest]
            self._metrics.holds(self._names.versions.values())
            self._drop_what_is_gone()
            try:
                await self._engine.unload(digest, version.task_adapters)
                is_erased = await self._engine.wait_until_erased(digest, ERASE_S)
            except Exception as error:  # the engine is gone, and the bundle with it
                logger.warning("could not release the memory of digest %s: %r", digest, error)
            else:
                logger.info("memory of digest %s released: no name and no request uses it", digest)
                self._audit.note("release", digest=digest, erased=is_erased)

    # ---- reports -----------------------------------------------------------------------------------------------

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def users_of_adapter(self, adapter: str) -> list[str]:
        """List the bundles that need this LoRA adapter."""
        return self._names.users_of_adapter(adapter)

    async def show(self, *, is_admin: bool = False) -> MemoryBundleList:
        """`list`, with the requests of all API processes."""
        return self.list(is_admin=is_admin, elsewhere=await self._followers.active())

    async def show_one(self, name: str, *, is_admin: bool = False) -> MemoryBundleDetail:
        """`detail`, with the requests of all API processes."""
        return self.detail(name, is_admin=is_admin, elsewhere=await self._followers.active())

    async def traces(
        self, owner: str, cache_salt: str | None, response_id: str, *, asker: int | None = None
    ) -> list[dict[str, Any]]:
        """The traces of a response of any API process but the one that asks."""
        asked = {"owner": owner, "cache_salt": cache_salt, "response_id": response_id}
        return self.own_traces(*asked.values()) or await self._followers.traces(asker, **asked)

    def list(self, *, is_admin: bool = False, elsewhere: Mapping[str, int] = _NOBODY) -> MemoryBundleList:
        """What is loaded; `elsewhere` are the requests of other API processes, by digest."""
        draining = [v for v in self._names.versions.values() if not v.names]
        return MemoryBundleList(
            data=[self._card(name, is_admin, elsewhere) for name in self._names.by_name],
            draining=[
                DrainingMemory(digest=v.memory.digest, active_requests=v.active + elsewhere.get(v.memory.digest, 0))
                for v in draining
            ],
        )

    def detail(
        self, name: str, *, is_admin: bool = False, elsewhere: Mapping[str, int] = _NOBODY
    ) -> MemoryBundleDetail:
        """What is known of a name; `elsewhere` are the requests of other API processes, by digest.

        Raises:
            UnknownBundle: no bundle of this name is loaded, on its way or draining, and none has failed lately.
        """
        loading, failure = self._readiness.is_loading(name), self._readiness.failure(name)
        left = self._names.versions.get(self._readiness.last_digest(name) or "")
        state: BundleState
        if name in self._names:
            state = "ready"
        elif loading:
            state = "loading"
        elif failure is not None:
            state = "failed"
        elif left is not None and not left.names:
            state = "draining"
        else:
            raise UnknownBundle(f"no memory bundle {name!r:.200} is loaded")
        if failure is not None and not is_admin:
            failure = failure.model_copy(update={"reason": None})
        return MemoryBundleDetail(
            name=name,
            state=state,
            loading=loading,
            failure=failure,
            bundle=self._card(name, is_admin, elsewhere) if name in self._names else None,
        )

    def _card(self, name: str, is_admin: bool, elsewhere: Mapping[str, int] = _NOBODY) -> MemoryBundleCard:
        version = self._names.of(name)
        return version.card(name, self._history.of(name), is_admin, elsewhere.get(version.memory.digest, 0))


def _check_adapter_files(name: str, folder: Path, record: AdapterRecord, access: Access | None) -> None:
    if access is not None:
        access.inside(str(folder), f"bundle {name!r}: the adapter of task {record.task!r}")
    if (digest := read_adapter(folder).digest) != record.digest:
        raise BundleError(
            f"bundle {name!r}: the adapter of task {record.task!r} in {folder} is not the one that the bundle was made "
            f"with: expected digest {record.digest:.12}, found {digest:.12}"
        )
