"""What a server has read of a bundle and does not keep is overwritten, whatever became of the load."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest

from inducekv_vllm.bundle import AdapterRecord, Bundle, read_bundle, spans, write_bundle
from inducekv_vllm.config import InduceKVConfig
from inducekv_vllm.engine.memory_index import MemoryIndex
from inducekv_vllm.errors import BundleError, CapacityError, LoadTimeout, UnsupportedModel
from tests.inducekv_vllm.bundles import random_bundle, random_gate
from tests.server.test_several_processes import Processes, files, processes
from tests.server.test_versions import DIGEST, Workers, begin

pytestmark = pytest.mark.anyio
__all__ = ["files", "processes"]  # fixtures


class Read:
    """All that was read of bundles while the test ran."""

    def __init__(self) -> None:
        self.indexes: list[MemoryIndex] = []
        self.tensors: list[memoryview] = []  # the memory that they were read into

    def left(self) -> list[str]:
        """The digests of the indexes that are not erased. Of the tensors, none may be left."""
        assert self.indexes or self.tensors
        assert not any(map(any, self.tensors))
        return [memory.digest for memory in self.indexes if _has_content(memory)]


def _has_content(memory: MemoryIndex) -> bool:
    keys = [] if memory.gate is None else [memory.gate.weights]
    if memory.index is not None:
        index = memory.index
        keys.append(faiss.rev_swig_ptr(index._index.get_xb(), index.num_entries * index.hidden_size))
    return any(map(np.any, keys))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    read, make, fill = Read(), MemoryIndex.from_bundle, spans._read_span

    def made(bundle: Bundle, path: str) -> MemoryIndex:
        read.indexes.append(make(bundle, path))
        return read.indexes[-1]

    def filled(source: Any, start: int, content: memoryview, name: str) -> None:
        read.tensors.append(content)
        fill(source, start, content, name)

    monkeypatch.setattr(MemoryIndex, "from_bundle", staticmethod(made))
    monkeypatch.setattr(spans, "_read_span", filled)
    return read


class Registry:
    """A registry whose workers take everything, or refuse it."""

    def __init__(self, files: Path, **settings: Any) -> None:
        self.files, self.workers = files, Workers()
        self.registry = begin(InduceKVConfig(**settings), self.workers)

    async def load(self, content: str, name: str = "m") -> None:
        await self.registry.load(name, str(self.files / f"{content}.safetensors"), replace=True)

    async def settled(self) -> None:
        while self.registry._engine.background:
            await asyncio.gather(*self.registry._engine.background)


@pytest.fixture
def registry(files: Path) -> Registry:
    return Registry(files)


@pytest.mark.parametrize("again", ["m", "n"])
async def test_of_a_content_that_is_read_twice(registry: Registry, read: Read, again: str) -> None:
    await registry.load("a")
    await registry.load("a", again)
    assert read.left() == [DIGEST["a"]]
    for name in {"m", again}:
        await registry.load("b", name)
        await registry.registry.forget(name)
    await registry.settled()
    assert len(read.indexes) == 3 + (again == "n")
    assert read.left() == [DIGEST["b"]]


async def test_of_a_load_that_the_workers_refuse(
    registry: Registry, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = registry.workers.collective_rpc

    async def refuse(method: str, args: tuple[str, ...] = ()) -> list[Any]:
        answers = await ask(method, args)
        return [{"ok": False, "error": "no room", "is_full": True}] if method == "inducekv_load_outcome" else answers

    monkeypatch.setattr(registry.workers, "collective_rpc", refuse)
    with pytest.raises(CapacityError, match="no room"):
        await registry.load("a")
    assert (len(read.indexes), read.left()) == (1, [])


def needs_adapter() -> Bundle:
    return random_bundle(adapter="style")


def routed() -> Bundle:
    """Its adapter's folder does not exist."""
    gate = random_gate(tasks=("t", "u"))
    record = AdapterRecord(task="u", path="adapters/u", digest="c" * 64, rank=2)
    decoupled = {"form": "decoupled", "weighting": "uniform", "activations": {"t": "text"}}
    return random_bundle(**decoupled, gate=gate, task_adapters=(record,))


@pytest.mark.parametrize(
    ("make", "error"), [(needs_adapter, UnsupportedModel), (routed, BundleError)], ids=["adapter", "routed"]
)
async def test_of_a_bundle_whose_adapter_is_not_there(
    registry: Registry, read: Read, make: Callable[[], Bundle], error: type[Exception]
) -> None:
    write_bundle(make(), registry.files / "new.safetensors")
    with pytest.raises(error, match="adapter"):
        await registry.load("new")
    assert (len(read.indexes), read.left()) == (1, [])


async def test_of_a_rollback_to_a_file_that_has_changed(registry: Registry, read: Read) -> None:
    await registry.load("a")
    await registry.load("b")
    await registry.settled()
    shutil.copy(registry.files / "c.safetensors", registry.files / "a.safetensors")
    with pytest.raises(BundleError, match="the file has changed"):
        await registry.registry.rollback("m")
    assert (len(read.indexes), read.left()) == (3, [DIGEST["b"]])


async def test_of_a_load_that_nobody_waits_for_any_more(
    files: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, goes_on = Registry(files, load_timeout_s=0.2), threading.Event()
    plain = registry.registry._read

    def late(name: str, path: str, access: Any) -> MemoryIndex:
        memory = plain(name, path, access)
        assert goes_on.wait(30)
        return memory

    monkeypatch.setattr(registry.registry, "_read", late)
    with pytest.raises(LoadTimeout):
        await registry.load("a")
    goes_on.set()
    async with asyncio.timeout(30):
        while read.left():
            await asyncio.sleep(0.01)
    assert len(read.indexes) == 1


async def test_of_a_file_that_has_changed_for_another_process(
    processes: Processes, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    follower = processes.followers[1]
    plain = follower._read
    monkeypatch.setattr(follower, "_read", lambda name, _: plain(name, str(processes.files / "c.safetensors")))
    with pytest.raises(BundleError, match="changed while it was loaded"):
        await processes.load("b", 0)
    await processes.settled()
    async with asyncio.timeout(30):
        while read.left():  # the other process has read it, and hears that it is not needed
            await asyncio.sleep(0.01)
    assert sorted(memory.digest for memory in read.indexes) == sorted([DIGEST["b"], DIGEST["b"], DIGEST["c"]])


@pytest.mark.parametrize("damage", ["value", "shorter"])
def test_of_a_file_that_is_refused(files: Path, read: Read, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    path = files / "a.safetensors"
    if damage == "value":
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        fill = spans._read_span

        def cut(source: Any, start: int, content: memoryview, name: str) -> None:
            fill(source, start, content, name)
            if len(read.tensors) == 4:
                raise BundleError("the file became shorter while it was read")

        monkeypatch.setattr(spans, "_read_span", cut)
    with pytest.raises(BundleError):
        read_bundle(path)
    assert len(read.tensors) >= 4
    assert read.left() == []
