"""Bundles are read and checked in a thread, which leaves the cores to the requests that run."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Final, TypeVar, cast

from vllm.engine.protocol import EngineClient
from vllm.v1.engine.async_llm import AsyncLLM

from inducekv_vllm.backbone.fact_reader import FactReader
from inducekv_vllm.bundle import (
    MAX_SERVED_BYTES,
    AdapterRecord,
    BackboneFingerprint,
    Bundle,
    read_bundle,
    read_public_key,
    require_signature,
    write_bundle,
)
from inducekv_vllm.bundle.adapters import read_adapter
from inducekv_vllm.errors import BundleError, CapacityError, ConfigError, UnsupportedModel
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.pace import beside_requests
from inducekv_vllm.teaching import Report, Taught
from inducekv_vllm.vllm_seams.config import InduceKVConfig

from .access import Access, stable_path
from .adapters import adapter_folder
from .state import ServerState, VersionRecord

T = TypeVar("T")
Teaching = Callable[[Bundle | None, FactReader], Taught]  # None for the first version of a name
PIECE_S: Final = 0.001  # of a read, in CPU time
READS: Final = 4  # at a time, in threads of their own: what requests ask of the state does not wait for them


@dataclasses.dataclass(frozen=True)
class Checked:
    """A bundle that has been read and checked."""

    memory: ServedBundle
    bundle: bytes | None = None  # the content of its file, to be kept

    def at(self, path: str) -> Checked:
        """The same, in another place."""
        return dataclasses.replace(self, memory=dataclasses.replace(self.memory, path=path))


@dataclasses.dataclass(frozen=True)
class Changed:
    """A version of a bundle, made from the one before."""

    checked: Checked  # what is to be served
    report: Report


class BundleReader:
    def __init__(
        self, client: EngineClient, backbone: BackboneFingerprint, state: ServerState, config: InduceKVConfig
    ) -> None:
        """Raises ConfigError: a public key cannot be used."""
        self._client, self._backbone, self._state = client, backbone, state
        self._signers = [read_public_key(path) for path in config.require_signature]
        self._checked: set[str] = set()  # digests of which this process has checked what the workers cannot
        self._threads = ThreadPoolExecutor(READS, "inducekv-read")
        self._folder = tempfile.TemporaryDirectory(prefix="inducekv-")  # of files on their way to the workers

    async def read(self, name: str, path: str, access: Access | None, *, keep: bool = True) -> Checked:
        """A bundle to be served under a name; `path` is what `access` has found inside.

        With `keep`, a state that outlives the server keeps its content.

        Raises:
            BundleError: it is no valid bundle, was made for another backbone, or an adapter of its tasks is another.
        """
        return await self._in_thread(self._read_checked, name, path, access, keep and self._state.keeps_bundles)

    @contextlib.asynccontextmanager
    async def version(self, record: VersionRecord) -> AsyncIterator[Checked]:
        """A version that is kept. Its file may be gone after the context.

        Raises:
            BundleError: as for `read`; or the file holds something else now.
        """
        async with self._file_of(record.name, record.digest) as path:
            yield await self._in_thread(self._read_version, path, record.name, record.digest)

    @contextlib.asynccontextmanager
    async def again(self, name: str, memory: ServedBundle) -> AsyncIterator[str]:
        """The path of a version that is kept, to be loaded again. Its file may be gone after the context.

        It is not read here, but once for who has signed it, and for its adapters: the workers compare its digest.

        Raises:
            BundleError: as for `version`.
        """
        async with self._file_of(name, memory.digest) as path:
            if self._has_more(memory) and memory.digest not in self._checked:
                await self._in_thread(self._read_version, path, name, memory.digest)
            yield path

    @contextlib.asynccontextmanager
    async def changed(self, record: VersionRecord | None, teach: Teaching) -> AsyncIterator[Changed]:
        """The next version of one that is served, or the first of a name. Its file is gone after the context.

        Raises:
            InduceKVError: what `teach` raises; or the version before cannot be read, or not be served if changed.
        """
        if self._signers:
            raise ConfigError("this server serves signed bundles alone, and what is taught over HTTP is not signed")
        async with contextlib.AsyncExitStack() as stack:
            path = None
            if record is not None:
                path = await stack.enter_async_context(self._file_of(record.name, record.digest))
            changed = await self._in_thread(self._change, path, record, teach)
        try:
            yield changed
        finally:
            Path(changed.checked.memory.path).unlink(missing_ok=True)

    def _change(self, path: str | None, record: VersionRecord | None, teach: Teaching) -> Changed:
        before = None
        if path is not None and record is not None:
            source = f"bundle {record.name!r} ({path})"
            before = read_bundle(path, backbone=self._backbone, digest=record.digest, name=source)
            if before.metadata.task_adapters:
                raise UnsupportedModel(
                    f"bundle {record.name!r} sends tasks to LoRA adapters: teach it with inducekv-bundle"
                )
        made = teach(before, self.facts)
        file = Path(self._folder.name, f"{made.bundle.digest}.safetensors")
        write_bundle(made.bundle, file, verify=False)
        memory = ServedBundle.from_bundle(made.bundle, str(file))
        return Changed(Checked(memory, file.read_bytes()), made.report)

    @cached_property
    def facts(self) -> FactReader:
        """How the served model's prompts are read; made in a thread. Raises UnsupportedModel."""
        return FactReader.of_engine(self._client.vllm_config, self._backbone)

    @contextlib.asynccontextmanager
    async def _file_of(self, name: str, digest: str) -> AsyncIterator[str]:
        """A copy of what the state has, or what it was loaded from. Raises CapacityError: no room for a copy."""
        path, bundle = await asyncio.to_thread(self._state.kept, digest)
        if bundle is None:
            yield path
            return
        copy = Path(self._folder.name, f"kept-{digest}.safetensors")
        try:
            try:
                await asyncio.to_thread(copy.write_bytes, bundle)
            except OSError as error:
                reason = f"bundle {name!r} cannot be copied for the workers: {error.strerror}"
                raise CapacityError(reason) from error
            yield str(copy)
        finally:
            copy.unlink(missing_ok=True)

    async def _in_thread(self, read: Callable[..., T], *arguments: object) -> T:
        def run() -> T:
            with beside_requests(self._requests_go_first):
                return read(*arguments)

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def _requests_go_first(self) -> float:
        """Wait if there are any; a read takes a quarter of a core then."""
        if cast(AsyncLLM, self._client).get_num_unfinished_requests():
            time.sleep(3 * PIECE_S)
        return PIECE_S

    def _read_version(self, path: str, name: str, digest: str) -> Checked:
        checked = self._read_checked(name, path, None, keep=False)
        if checked.memory.digest != digest:
            raise BundleError(
                f"bundle {name!r} ({path}): the file has changed: expected digest {digest}, found "
                f"{checked.memory.digest}; a server with a state file keeps bundles"
            )
        return checked

    def _read_checked(self, name: str, path: str, access: Access | None, keep: bool) -> Checked:
        with contextlib.nullcontext(path) if access is None else stable_path(path, f"bundle {name!r}") as file:
            checked = self._read(name, path, file, keep)
        for record in checked.memory.metadata.task_adapters:
            _check_adapter_files(name, adapter_folder(checked.memory, record), record, access)
        if self._has_more(checked.memory):
            self._checked.add(checked.memory.digest)
        return checked

    def _has_more(self, memory: ServedBundle) -> bool:
        """Whether a version has what its digest does not tell."""
        return bool(self._signers or memory.metadata.task_adapters)

    def _read(self, name: str, path: str, file: str, keep: bool) -> Checked:
        """`file` is what leads to the bundle now, `path` what will later."""
        source = f"bundle {name!r} ({path})"
        bundle = read_bundle(file, backbone=self._backbone, max_bytes=MAX_SERVED_BYTES, name=source)
        if self._signers:
            # Of what was read, not of the file: it may be another one by now. The workers compare the digest.
            require_signature(bundle.signature, bundle.digest, self._signers, source)
        try:
            memory = dataclasses.replace(ServedBundle.from_bundle(bundle, file), path=path)
        except OSError as error:
            raise BundleError(f"{path}: the file was removed while it was loaded") from error
        if not keep or bundle.metadata.task_adapters:  # their folders may be relative to its own
            return Checked(memory)
        copy = Path(self._folder.name, f"{bundle.digest}.safetensors")
        write_bundle(bundle, copy, verify=False)
        content = copy.read_bytes()
        copy.unlink()
        return Checked(memory, content)


def _check_adapter_files(name: str, folder: Path, record: AdapterRecord, access: Access | None) -> None:
    if access is not None:
        access.inside(str(folder), f"bundle {name!r}: the adapter of task {record.task!r}")
    if (digest := read_adapter(folder).digest) != record.digest:
        raise BundleError(
            f"bundle {name!r}: the adapter of task {record.task!r} in {folder} is not the one that the bundle was made "
            f"with: expected digest {record.digest:.12}, found {digest:.12}"
        )
