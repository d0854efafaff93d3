"""The registry of an API process that is not the first one of its server: it does what that one says (`followers.py`).

It asks the first process for every change, and for what is known of all processes. Its own are the requests that it
answers, and their leases: the first process hears when a version without a name is not used here any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.exceptions import RetryableRequestError
from vllm.lora.request import LoRARequest

from inducekv_vllm.bundle import BackboneFingerprint, read_bundle
from inducekv_vllm.engine.memory import Memory
from inducekv_vllm.engine.memory_engine import Lease
from inducekv_vllm.engine.stopping import EngineStop
from inducekv_vllm.errors import BundleError, ConfigError
from inducekv_vllm.host.config import InduceKVConfig

from .access import Access
from .metrics import RegistryMetrics
from .named import NamedVersions
from .peers import Handler, Link
from .reading import read_in_thread
from .schemas import ForgottenVersions, MemoryBundleCard, MemoryBundleDetail, MemoryBundleList
from .version import Version

MEETING_POLL_S: Final = 0.1
FIRST: Final = "the first API process"


class PeerRegistry:
    """See the module docstring. It belongs to the server's event loop."""

    def __init__(
        self,
        client: EngineClient,
        models: OpenAIServingModels,
        backbone: BackboneFingerprint,
        rank: int,
        config: InduceKVConfig | None = None,
        stop: EngineStop | None = None,
    ) -> None:
        """`rank` is this process's number; that of the first one is 0."""
        self._client = client
        self._rank = rank
        self._config = config or InduceKVConfig()
        self._stop = stop or EngineStop(client)
        self._backbone = backbone
        self._metrics = RegistryMetrics(is_first=False)
        self._names = NamedVersions(models, self._metrics, self._release_if_unused)
        self._wanted: set[str] = set()  # versions that are prepared, or on their way
        self._begun = asyncio.Event()
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self.on_gone: Callable[[str], None] = lambda digest: None
        self.own_traces: Callable[..., list[dict[str, Any]]] = lambda *_: []
        told: dict[str, Handler] = {}
        told |= {"prepare": self._prepare, "discard": self._discard, "point": self._point, "remove": self._remove}
        told |= {"pause": self._pause, "resume": self._resume, "gone": self._gone, "begin": self._begin}
        told |= {"active": self._active, "traces": self._own_traces}
        self._first = Link(FIRST, told)
        self._first.on_lost = self._may_begin.set

    async def start(self) -> None:
        """Connect to the first process, and return when all of its bundles are here too."""
        while not (address := (await self._client.collective_rpc("inducekv_meet", args=(None,)))[0]):
            await asyncio.sleep(MEETING_POLL_S)
        self._first.begin(*await asyncio.open_unix_connection(address))
        await self._first.call("join", rank=self._rank)
        await self._begun.wait()

    # ---- what the first process says ---------------------------------------------------------------------------

    async def _prepare(
        self, name: str, path: str, digest: str, resident_bytes: int, adapters: dict[str, list[Any]]
    ) -> None:
        """Read a version, which stays until it is pointed to or discarded."""
        self._wanted.add(digest)
        if digest in self._names.versions:
            return
        memory = await read_in_thread(self._client, self._read, name, path)
        if memory.digest != digest:
            self._wanted.discard(digest)
            raise BundleError(f"{path} changed while it was loaded: expected digest {digest}, found {memory.digest}")
        if digest not in self._wanted:
            raise ConfigError(f"bundle {name!r}: its load was given up")
        requests = {
            task: LoRARequest(lora_name=lora_name, lora_int_id=number, lora_path=folder)
            for task, (lora_name, number, folder) in adapters.items()
        }
        # It may be there already: given up, and asked for again before it was read.
        self._names.versions.setdefault(digest, Version(memory, resident_bytes, requests))

    def _read(self, name: str, path: str) -> Memory:
        """Runs in a thread. The first process has checked all but what the file is now."""
        bundle = read_bundle(path, backbone=self._backbone, name=f"bundle {name!r} ({path})")
        try:
            return Memory.from_bundle(bundle, path)
        except OSError as error:
            raise BundleError(f"{path}: the file was removed while it was loaded") from error

    async def _discard(self, digest: str) -> None:
        self._wanted.discard(digest)
        if (version := self._names.versions.get(digest)) is not None:
            self._release_if_unused(version)

    async def _point(self, name: str, digest: str, path: str, handle_id: int) -> None:
        self._wanted.discard(digest)
        self._names.point(name, self._names.versions[digest], path, handle_id)

    async def _remove(self, name: str) -> None:
        self._names.remove(name)

    async def _gone(self, digest: str) -> None:
        self.on_gone(digest)

    async def _pause(self) -> None:
        self._may_begin.clear()

    async def _resume(self) -> None:
        self._may_begin.set()

    async def _begin(self) -> None:
        self._begun.set()

    async def _active(self) -> dict[str, int]:
        return {digest: version.active for digest, version in self._names.versions.items() if version.active}

    async def _own_traces(self, owner: str, cache_salt: str | None, response_id: str) -> list[dict[str, Any]]:
        return self.own_traces(owner, cache_salt, response_id)

    def _release_if_unused(self, version: Version) -> None:
        self._metrics.holds(self._names.versions.values())
        digest = version.memory.digest
        if not version.is_unused or digest in self._wanted:
            return
        del self._names.versions[digest]
        self._first.tell("released", digest=digest)

    # ---- requests ----------------------------------------------------------------------------------------------

    async def may_begin(self) -> None:
        """Wait while a change takes effect in all processes."""
        await self._may_begin.wait()

    @contextmanager
    def lease(self, model: str) -> Iterator[Lease]:
        """`NamedVersions.lease`.

        Raises:
            RetryableRequestError: the first process is gone, so that nobody knows what is current.
        """
        if not self._first.is_open:
            raise RetryableRequestError(f"{FIRST} of this server is gone: the server is shutting down")
        with self._names.lease(model) as lease:
            yield lease

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def users_of_adapter(self, adapter: str) -> list[str]:
        return self._names.users_of_adapter(adapter)

    # ---- what the first process is asked -----------------------------------------------------------------------

    async def load(
        self,
        name: str,
        path: str,
        *,
        replace: bool = False,
        expected_digest: str | None = None,
        who: str,
        access: Access | None = None,
    ) -> MemoryBundleCard:
        """`BundleRegistry.load`. The first process resolves the path by its own access, which is the same."""
        asked = {"path": path, "replace": replace, "expected_digest": expected_digest, "who": who}
        return MemoryBundleCard.model_validate(await self._change("load", name, **asked))

    async def rollback(
        self, name: str, *, digest: str | None = None, expected_digest: str | None = None, who: str
    ) -> MemoryBundleCard:
        """`BundleRegistry.rollback`."""
        asked = {"digest": digest, "expected_digest": expected_digest, "who": who}
        return MemoryBundleCard.model_validate(await self._change("rollback", name, **asked))

    async def forget(
        self, name: str, *, digest: str | None = None, expected_digest: str | None = None, who: str
    ) -> ForgottenVersions:
        """`BundleRegistry.forget`."""
        asked = {"digest": digest, "expected_digest": expected_digest, "who": who}
        return ForgottenVersions.model_validate(await self._change("forget", name, **asked))

    async def unload(self, name: str, *, expected_digest: str | None = None, who: str) -> str:
        """`BundleRegistry.unload`."""
        return str(await self._change("unload", name, expected_digest=expected_digest, who=who))

    async def _change(self, change: str, name: str, **asked: Any) -> Any:
        with self._stop.running():
            return await self._first.call("change", change=change, name=name, asked=asked)

    async def show(self, *, is_admin: bool = False) -> MemoryBundleList:
        """`BundleRegistry.show`."""
        return MemoryBundleList.model_validate(await self._first.call("show", is_admin=is_admin))

    async def show_one(self, name: str, *, is_admin: bool = False) -> MemoryBundleDetail:
        """`BundleRegistry.show_one`."""
        return MemoryBundleDetail.model_validate(await self._first.call("show_one", name=name, is_admin=is_admin))

    async def traces(self, owner: str, cache_salt: str | None, response_id: str) -> list[dict[str, Any]]:
        """`BundleRegistry.traces`."""
        asked = {"owner": owner, "cache_salt": cache_salt, "response_id": response_id}
        if found := self.own_traces(*asked.values()):
            return found
        return list(await self._first.call("traces", **asked))

    # ---- the audit log, which the first process writes ---------------------------------------------------------

    def refusal(self, change: str, name: str | None, by: str, reason: str) -> None:
        """`AuditLog.refusal`."""
        self._first.tell("refusal", change=change, name=name, by=by, reason=reason)

    async def answer(self, request_id: str, owner: str, trace: dict[str, Any]) -> None:
        """`AuditLog.answer`. Raises RetryableRequestError: the first process is gone."""
        await self._first.call("answer", request_id=request_id, owner=owner, trace=trace)
