"""The known bundles: their names, their versions, and how they change.

A *version* is one content (digest). It is resident on the workers once, under any number of names, or *cold*: it has
left the pool, and is loaded again for the next request (`bringing.py`). A request leases the version of its name when
it begins and keeps it until it ends (`versions.py`). Every API process of a server has a registry, over the state that
they share (`state/`); none of them is special once the server has started:

- A change is made by the process that is asked, one at a time: load on every rank of every engine, record, serve.
- A request reads in the state what its name stands for. So no request that begins after another one was answered by
  the new version is answered by the old one, whichever processes the two reach.
- A version that no name stands for any more drains: the process whose request is the last to use it releases it.
"""

import asyncio
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.exceptions import RetryableRequestError

from inducekv_vllm import __version__
from inducekv_vllm.bundle import BackboneFingerprint
from inducekv_vllm.errors import CapacityError, ConfigError
from inducekv_vllm.frontend.memory_engine import Lease
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.frontend.stopping import EngineStop
from inducekv_vllm.teaching import Report
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from inducekv_vllm.vllm_seams.logs import logger_of

from .access import Access
from .adapters import task_adapters
from .bringing import Bringing, NotBrought
from .cards import card, listing
from .changes import Changes
from .engines import Engines
from .journal import Journal
from .metrics import RegistryMetrics
from .names import Names
from .reader import BundleReader, Teaching
from .resolvers import resolver_of
from .resolving import Resolving
from .schemas import Change, ForgottenVersions, MemoryBundleCard, MemoryBundleList
from .state import ServerState, StateError
from .versions import POLL_S, Versions, unpinned

logger = logger_of(__name__)

START: Final = "start"  # who loads the bundles of the command line
TAUGHT: Final = "taught over HTTP"  # in place of a path
PAGE: Final = 1000  # names of a list


@dataclass(frozen=True)
class ChangedFacts:
    """What a change of facts has done."""

    card: MemoryBundleCard  # of the version that is served now
    report: Report


class BundleRegistry:
    """See the module docstring. It belongs to the event loop of its API process."""

    def __init__(
        self,
        engines: Engines,
        models: OpenAIServingModels,
        backbone: BackboneFingerprint,
        state: ServerState,
        config: InduceKVConfig | None = None,
        stop: EngineStop | None = None,
    ) -> None:
        """Raises ConfigError: a public key cannot be used."""
        client, self._config, self.state = engines.client, config or InduceKVConfig(), state
        self._metrics = RegistryMetrics(is_first=state.process == 0)
        self.journal = Journal(state, self._config)
        self._names = Names(models, state, self._config, client.vllm_config)
        self._reader = BundleReader(client, backbone, state, self._config)
        self.versions = Versions(engines, state, self.journal, self._metrics)
        self._bringing = Bringing(self.versions, engines, self._reader)
        self._changes = Changes(
            self.versions, self._bringing, self._names, self.journal, self._metrics, stop or EngineStop(client)
        )
        self._resolving: Resolving | None = None
        if self._config.resolver is not None:
            resolver = resolver_of(self._config.resolver)
            self._resolving = Resolving(resolver, self._changes, self._reader, self._config)

    # ---- start ---------------------------------------------------------------------------------------------------

    async def start(self, run: str, admin_key: str | None = None) -> None:
        """The first process loads the bundles of the settings, and of an earlier server with this state what is pinned.

        Its other names are cold. A name that was changed while that server ran keeps its version, whatever the settings
        say. If that version is damaged, the name keeps what is recorded of it, and its requests are refused. The other
        processes of this run wait for the first one. `admin_key`: how the audit chain names it.

        Raises:
            InduceKVError: a bundle cannot be loaded.
        """
        if self.state.process == 0:
            await asyncio.to_thread(self.state.begin, {"version": __version__, "admin_key": admin_key})
            await self._begin_with_settings()
            for name in await asyncio.to_thread(lambda: self.state.pinned):
                with contextlib.suppress(RetryableRequestError, CapacityError):  # it is logged
                    await self._bringing.hold([name])
            await asyncio.to_thread(self.state.begun, run)
        while not await asyncio.to_thread(self.state.has_begun, run):
            await asyncio.sleep(POLL_S)
        await self.versions.begin()

    async def _begin_with_settings(self) -> None:
        for name in await asyncio.to_thread(self.state.names_of, START):
            if name not in self._config.bundles:
                await asyncio.to_thread(self.state.unload, name, START)
        for name, path in self._config.bundles.items():
            records = self.state.records(name)
            if records and records[0].by != START:
                digest = records[0].digest
                logger.warning("memory bundle %r stays at digest %s of the state file, not %s", name, digest, path)
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
            access: the folders that the bundle and its adapters must lie in; None for any.
            pin: whether the name's versions stay in the pool; None as before, or not.

        Raises:
            ConfigError: the name is invalid or taken.
            UnknownBundle: no bundle of this name is loaded, and this would not load the first one.
            StateError: the change cannot be recorded.
            VersionConflict: the name does not stand for `expected_digest`.
            BundleError: the file is not a valid bundle, was made for another backbone, or lies elsewhere; or a worker
                cannot load it.
            UnsupportedModel: the bundle needs LoRA and the server has none, or the other way round.
            CapacityError: there is no room for it, there are too many bundles, or it takes too long.
            TooManyChanges, RetryableRequestError: too many changes wait, or the server is shutting down.
        """
        async with self._changes.making(Change.LOAD, name, who, expected_digest=expected_digest) as made:
            self._names.check_name(name, replace=replace or expected_digest is not None)
            if access is None:
                source = os.path.abspath(os.path.expanduser(path))
            else:
                source = await asyncio.to_thread(access.inside, path, f"bundle {name!r}")
            checked = await self._reader.read(name, source, access)
            await made.serve(checked, source, keep=self._config.keep_versions, pin=pin)
            return self.card(name)

    async def rollback(
        self, name: str, *, digest: str | None = None, expected_digest: str | None = None, who: str = START
    ) -> MemoryBundleCard:
        """Point `name` to an earlier version that is kept: that of `digest`, or the one before.

        It becomes the newest version, so that another rollback goes back to where this one began.

        Raises:
            InduceKVError, RetryableRequestError: as for `load`; no such version is kept, or its file is gone.
        """
        async with self._changes.making(Change.ROLLBACK, name, who, expected_digest=expected_digest) as made:
            if not (earlier := self._names.earlier(name, digest)):
                raise ConfigError(f"memory bundle {name!r} has no earlier version; kept are: none")
            async with self._reader.version(earlier[0]) as checked:
                await made.serve(checked, earlier[0].source, keep=self._config.keep_versions)
            return self.card(name)

    async def forget(
        self, name: str, *, digest: str | None = None, expected_digest: str | None = None, who: str = START
    ) -> ForgottenVersions:
        """Drop the earlier versions of a name, or that of `digest`; a rollback to them is no longer possible.

        Raises:
            InduceKVError, RetryableRequestError: as for `load`; no such version is kept, or the name stands for it.
        """
        async with self._changes.making(Change.FORGET, name, who, expected_digest=expected_digest) as made:
            served = self.state.served(name).digest
            if digest == served:
                raise ConfigError(f"memory bundle {name!r} stands for the version {digest}: load another one first")
            gone = [each.digest for each in self._names.earlier(name, digest)]
            in_use = await made.record(self.state.forget, name, gone, who)
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
        async with self._changes.making(change, name, who, expected_digest=expected_digest) as made:
            self._names.check_name(name, replace=True)
            served = self.state.records(name)[0] if name in self._names else None
            async with self._reader.changed(served, teach) as changed:
                await made.serve(changed.checked, TAUGHT, keep=self._config.keep_versions)
            return ChangedFacts(self.card(name), changed.report)

    async def unload(self, name: str, *, expected_digest: str | None = None, who: str = START) -> str:
        """Remove a name with its versions and return its digest; running requests keep the version until they end.

        Raises:
            InduceKVError, RetryableRequestError: as for `load`.
        """
        async with self._changes.making(Change.UNLOAD, name, who, expected_digest=expected_digest) as made:
            return await made.unload()

    # ---- requests ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lease(self, model: str) -> Iterator[Lease]:
        """Run on the current version of a name until the context ends; the model may be pinned.

        Raises:
            UnknownBundle, RetryableRequestError: as `Versions.lease`; or the state cannot be read.
        """
        name, digest = unpinned(model)
        with contextlib.ExitStack() as stack:
            try:
                version = stack.enter_context(self.versions.lease(name, digest))
            except StateError as error:
                raise RetryableRequestError(str(error)) from error
            memory = version.memory
            metrics = self._metrics.of_requests(name, version)
            yield Lease(memory, task_adapters(memory), metrics=metrics)

    async def bring(self, *models: str) -> None:
        """Make what a request asks for resident, before vLLM looks for the names; nothing for those that are unknown.

        Raises:
            CapacityError, RetryableRequestError: as `Bringing.hold`; or the state cannot be read, or a bundle be found.
        """
        if self._resolving is None:
            await self._bringing.hold(models)
            return
        for name, _ in map(unpinned, models):
            await self._resolving.look(name)
        try:
            await self._bringing.hold(models)
        except NotBrought as error:
            if not error.is_damaged or not await self._resolving.look_again(error.name):
                raise
            await self._bringing.hold(models)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def card(self, name: str, *, is_admin: bool = True) -> MemoryBundleCard:
        """Raises UnknownBundle: no bundle of this name is loaded."""
        return card(self.state, self.versions.pool, name, is_admin)

    def shown(self, *, is_admin: bool = False, after: str = "", limit: int = PAGE) -> MemoryBundleList:
        """The next names after one, in alphabetical order; requests are those of this API process."""
        return listing(self.state, self.versions.pool, is_admin, after, limit)

    def memory(self, name: str) -> ServedBundle:
        """What a name stands for, resident or not; any thread may ask. Raises UnknownBundle: no bundle of this name."""
        return self.state.known(name).memory
