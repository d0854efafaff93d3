"""The loaded bundles: their names, their versions and the requests that use them.

A *version* is one content (digest). It is resident on the workers once, under any number of names. A request leases the
version of its name when it begins and keeps it until it ends. A version without names is released with its last lease.
Names are entries of vLLM's table of adapters, so every OpenAI route lists and accepts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.renderers.chat_utils import MM_PARSER_MAP

from inducekv_vllm.adapters import read_adapter
from inducekv_vllm.bundle import AdapterRecord, BackboneFingerprint, read_bundle
from inducekv_vllm.cpu_lora import groups_adapters
from inducekv_vllm.engine.memory_index import MemoryIndex
from inducekv_vllm.engine.two_pass import Lease, MemoryRequest
from inducekv_vllm.engine.wire import LOAD_POLL_S
from inducekv_vllm.errors import BundleError, CapacityError, ConfigError, UnknownBundle, UnsupportedModel

from .schemas import DrainingMemory, MemoryBundleCard, MemoryBundleList

logger = init_logger(__name__)

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
# vLLM applies an adapter named after a kind of message part ("image", "text") to every request with such a part.
PART_KINDS = frozenset(kind.split("_")[0] for kind in MM_PARSER_MAP) | {"audio", "file", "image", "text", "video"}
# A request that ends by a stop string ends in this process shortly before it ends in the engine.
RELEASE_DELAY_S = 0.05


@dataclass(eq=False)
class _Version:
    memory: MemoryIndex
    resident_bytes: int
    task_adapters: dict[str, LoRARequest]  # by task
    names: set[str] = field(default_factory=set)
    active: int = 0  # leases


def adapter_folder(memory: MemoryIndex, record: AdapterRecord) -> Path:
    """The folder of a task's adapter; a relative path is relative to the bundle's folder."""
    return Path(memory.path).parent / record.path


class BundleRegistry:
    """See the module docstring. It belongs to the server's event loop; changes happen one at a time."""

    def __init__(self, client: EngineClient, models: OpenAIServingModels, backbone: BackboneFingerprint) -> None:
        self._client = client
        self._models = models
        self._backbone = backbone
        self._versions: dict[str, _Version] = {}  # by digest
        self._named: dict[str, _Version] = {}
        self._change = asyncio.Lock()
        self._releases: set[asyncio.Task[None]] = set()

    # ---- changes -----------------------------------------------------------------------------------------------

    async def load(self, name: str, path: str, *, replace: bool = False) -> MemoryBundleCard:
        """Check a bundle, make it resident on every rank and point `name` to it.

        Loading the content that `name` already stands for changes nothing. An error changes nothing either.

        Raises:
            ConfigError: the name is invalid or taken.
            BundleError: the file is not a valid bundle, or was made for another backbone.
            UnsupportedModel: the bundle needs a LoRA adapter that the server does not have, or the other way round.
            CapacityError: a worker cannot load it.
        """
        async with self._change:
            self._check_name(name, replace)
            memory = await asyncio.to_thread(self._read_checked, name, path)
            self._check_adapter(name, memory)
            version = self._versions.get(memory.digest)
            if version is None:
                version = _Version(memory, await self._make_resident(memory), await self._load_adapters(name, memory))
                self._versions[memory.digest] = version
            try:
                self._check_name(name, replace)  # an adapter may have taken it in the meantime
            except ConfigError:
                self._release_if_unused(version)
                raise
            self._point(name, version, memory.path)
            logger.info("memory bundle %s: %d entries, digest %.12s", name, memory.num_entries, memory.digest)
            return self._card(name)

    async def unload(self, name: str) -> str:
        """Remove a name and return its digest; running requests keep the version until they end.

        Raises:
            UnknownBundle: no bundle of this name is loaded.
        """
        async with self._change:
            version = self._version(name)
            del self._named[name]
            del self._models.lora_requests[name]
            version.names.discard(name)
            self._release_if_unused(version)
            return version.memory.digest

    def _point(self, name: str, version: _Version, path: str) -> None:
        """Point `name` to `version`. Without an await, so no request sees an intermediate state."""
        previous = self._named.get(name)
        handle = MemoryRequest(
            lora_name=name,
            lora_int_id=self._models.lora_id_counter.inc(1),  # never sent to the engine, but must be unique
            lora_path=path,
            base_model_name=self._models.base_model_paths[0].name,
        )
        self._named[name] = version
        self._models.lora_requests[name] = handle
        version.names.add(name)
        if previous is not None and previous is not version:
            previous.names.discard(name)
            self._release_if_unused(previous)

    def _read(self, name: str, path: str) -> MemoryIndex:
        """Read and check a file; runs in a thread."""
        absolute = os.path.abspath(os.path.expanduser(path))
        bundle = read_bundle(absolute)
        bundle.require_backbone(self._backbone, f"bundle {name!r} ({path})")
        try:
            return MemoryIndex.from_bundle(bundle, absolute)
        except OSError as error:
            raise BundleError(f"{path}: the file was removed while it was loaded") from error

    def _read_checked(self, name: str, path: str) -> MemoryIndex:
        """`_read`, and the adapters of its tasks are those that the bundle was made with; runs in a thread."""
        memory = self._read(name, path)
        for record in memory.metadata.task_adapters:
            folder = adapter_folder(memory, record)
            if (digest := read_adapter(folder).digest) != record.digest:
                raise BundleError(
                    f"bundle {name!r}: the adapter of task {record.task!r} in {folder} is not the one that the bundle "
                    f"was made with: expected digest {record.digest:.12}, found {digest:.12}"
                )
        return memory

    async def _make_resident(self, memory: MemoryIndex) -> int:
        """Load on every rank, while requests run; return the bytes on one.

        If a rank fails, unload on all and raise CapacityError.
        """
        await self._client.collective_rpc("inducekv_load_bundle", args=(memory.path, memory.digest))
        while None in (answers := await self._client.collective_rpc("inducekv_load_outcome", args=(memory.digest,))):
            await asyncio.sleep(LOAD_POLL_S)
        refusals = [f"rank {rank}: {a['error']}" for rank, a in enumerate(answers) if not a["ok"]]
        if refusals:
            await self._client.collective_rpc("inducekv_unload_bundle", args=(memory.digest,))
            raise CapacityError(f"the engine cannot load {memory.path}: {'; '.join(refusals)}")
        return int(answers[0]["bytes"])

    async def _load_adapters(self, name: str, memory: MemoryIndex) -> dict[str, LoRARequest]:
        """Load the tasks' adapters into the engine. If one fails, unload what was loaded and raise UnsupportedModel."""
        adapters: dict[str, LoRARequest] = {}
        try:
            for record in memory.metadata.task_adapters:
                adapters[record.task] = LoRARequest(
                    # The prefix cache tells adapters apart by name.
                    lora_name=f"inducekv-{record.digest}",
                    lora_int_id=self._models.lora_id_counter.inc(1),
                    lora_path=str(adapter_folder(memory, record)),
                )
                await self._client.add_lora(adapters[record.task])
        except Exception as error:
            await self._unload(memory.digest, adapters)
            task = list(adapters)[-1]
            raise UnsupportedModel(f"bundle {name!r}: cannot load the adapter of task {task!r}: {error}") from error
        return adapters

    async def _unload(self, digest: str, adapters: dict[str, LoRARequest]) -> None:
        for adapter in adapters.values():
            await self._client.collective_rpc("remove_lora", args=(adapter.lora_int_id,))
        await self._client.collective_rpc("inducekv_unload_bundle", args=(digest,))

    # ---- checks ------------------------------------------------------------------------------------------------

    def _check_name(self, name: str, replace: bool) -> None:
        if not NAME_PATTERN.fullmatch(name):
            raise ConfigError(
                f"a bundle's name must be at most 128 letters, digits or . _ : / @ -, and begin with a letter or a "
                f"digit; found {name!r}"
            )
        if name.lower() in PART_KINDS:
            raise ConfigError(f"the name {name!r} is taken: vLLM reads it as a kind of message content")
        if self._models.is_base_model(name):
            raise ConfigError(f"the name {name!r} is taken by the served model")
        if name in self._models.lora_requests and name not in self._named:
            raise ConfigError(f"the name {name!r} is taken by a LoRA adapter")
        if name in self._named and not replace:
            raise ConfigError(f'a memory bundle {name!r} is loaded already; set "replace" to true to replace it')

    def _check_adapter(self, name: str, memory: MemoryIndex) -> None:
        lora_on = self._client.vllm_config.lora_config is not None
        if memory.metadata.task_adapters:
            self._check_task_adapters(name, memory)
        elif memory.adapter is None and lora_on and not groups_adapters(self._client.vllm_config):
            raise UnsupportedModel(
                f"the server runs with LoRA, but bundle {name!r} names no adapter: its keys and payloads were made "
                "without one"
            )
        if memory.adapter is not None:
            self._adapter(name, memory.adapter)

    def _check_task_adapters(self, name: str, memory: MemoryIndex) -> None:
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

    def _adapter(self, name: str, adapter: str) -> LoRARequest:
        request = self._models.lora_requests.get(adapter)
        if request is None or isinstance(request, MemoryRequest):
            loaded = sorted(n for n, r in self._models.lora_requests.items() if not isinstance(r, MemoryRequest))
            raise UnsupportedModel(
                f"bundle {name!r} needs the LoRA adapter {adapter!r}; loaded are: {', '.join(loaded) or 'none'}"
            )
        return request

    # ---- requests ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lease(self, name: str) -> Iterator[Lease]:
        """Keep the current version of `name` resident until the context ends.

        Raises:
            UnknownBundle: no bundle of this name is loaded.
            UnsupportedModel: its adapter is no longer loaded.
        """
        version = self._version(name)
        adapter = version.memory.adapter
        lease = Lease(
            version.memory, self._adapter(name, adapter) if adapter is not None else None, version.task_adapters
        )
        version.active += 1
        try:
            yield lease
        finally:
            version.active -= 1
            self._release_if_unused(version)

    def _version(self, name: str) -> _Version:
        try:
            return self._named[name]
        except KeyError:
            raise UnknownBundle(f"no memory bundle {name!r} is loaded") from None

    # ---- release -----------------------------------------------------------------------------------------------

    def _release_if_unused(self, version: _Version) -> None:
        if not version.names and not version.active:
            task = asyncio.get_running_loop().create_task(self._release(version))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, version: _Version) -> None:
        await asyncio.sleep(RELEASE_DELAY_S)
        async with self._change:
            digest = version.memory.digest
            if version.names or version.active or self._versions.get(digest) is not version:
                return  # loaded again in the meantime, or released by another task
            del self._versions[digest]
            try:
                await self._unload(digest, version.task_adapters)
            except Exception as error:  # the engine is gone, and the bundle with it
                logger.warning("could not unload memory bundle %.12s: %r", digest, error)

    # ---- reports -----------------------------------------------------------------------------------------------

    def __contains__(self, name: object) -> bool:
        return name in self._named

    def users_of_adapter(self, adapter: str) -> list[str]:
        """List the bundles that need this LoRA adapter."""
        return sorted(name for name, version in self._named.items() if version.memory.adapter == adapter)

    def list(self) -> MemoryBundleList:
        draining = [v for v in self._versions.values() if not v.names]
        return MemoryBundleList(
            data=[self._card(name) for name in self._named],
            draining=[DrainingMemory(digest=v.memory.digest, active_requests=v.active) for v in draining],
        )

    def _card(self, name: str) -> MemoryBundleCard:
        version = self._named[name]
        memory = version.memory
        facts: dict[str, Any] = {
            field: getattr(memory.metadata, field)
            for field in ("digest", "budget", "payload_tokens", "form", "weighting", "activations", "adapter")
        }
        return MemoryBundleCard(
            name=name,
            path=self._models.lora_requests[name].lora_path,
            entries=memory.num_entries,
            task_adapters={task: adapter.lora_path for task, adapter in version.task_adapters.items()},
            tasks=dict(Counter(entry.task for entry in memory.entries)),
            gate_tasks=list(memory.gate.tasks) if memory.gate is not None else None,
            file_bytes=memory.file_bytes,
            resident_bytes=version.resident_bytes,
            active_requests=version.active,
            **facts,
        )
