"""Bundles that nobody has loaded are found by name; what a resolver does wrong harms nobody who asks for others."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cachetools import TTLCache
from fsspec.implementations.memory import MemoryFileSystem
from vllm.exceptions import RetryableRequestError

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import ConfigError, UnsupportedModel
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from server import bringing, names, resolving
from server.registry import BundleRegistry
from server.resolvers import FolderResolver, resolver_of
from server.resolving import Resolving, default_cache
from server.versions import Turn
from tests.bundles import remade
from tests.server.registries import BUNDLES, DIGEST, RUN, Workers, begin, end, in_turn

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "MISS_S", 60.0)
    monkeypatch.setattr(resolving, "LOOK_S", 5.0)


def put(folder: Path, name: str, content: str) -> None:
    """A file appears, as `write_bundle` and object stores do it: at once."""
    path = folder / f"{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bundle(BUNDLES[content], path)


class Found:
    """A registry with a resolver."""

    def __init__(self, folder: Path, uri: str, **settings: Any) -> None:
        settings = {"resolver_refresh_s": 0.0, **settings}
        config = InduceKVConfig(resolver=uri, **settings)
        self.workers = Workers()
        self.registry: BundleRegistry = begin(config, self.workers, folder / "temporary")
        assert self.registry._resolving is not None
        self.resolving: Resolving = self.registry._resolving
        self.cache = Path(default_cache())

    async def ask(self, model: str) -> str | None:
        """Which bundle answers a request, None for 404."""
        await self.registry.bring(model)
        if model not in self.registry._names._models.lora_requests:
            return None
        with self.registry.lease(model) as lease:
            return next(name for name, digest in DIGEST.items() if digest == lease.memory.digest)

    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The names that the resolver will be asked for."""
        names: list[str] = []
        tag = self.resolving._resolver.tag

        def counted(name: str) -> str | None:
            names.append(name)
            return tag(name)

        monkeypatch.setattr(self.resolving._resolver, "tag", counted)
        return names


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's are the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))


@pytest.fixture
async def found(tmp_path: Path) -> AsyncIterator[Found]:
    (tmp_path / "bundles").mkdir()
    found = Found(tmp_path, str(tmp_path / "bundles"))
    yield found
    await end(found.registry)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "bundles"


async def test_a_name_is_found_and_known_from_then_on(found: Found, folder: Path) -> None:
    put(folder, "acme", "a")
    put(folder, "team/acme", "b")
    assert await found.ask("nobody") is None
    assert found.registry.shown().data == []
    assert [await found.ask(name) for name in ("acme", "team/acme", f"acme@{DIGEST['a'][:12]}")] == ["a", "b", "a"]
    assert await found.ask(f"acme@{DIGEST['b'][:12]}") is None
    cards = {card.name: card for card in found.registry.shown(is_admin=True).data}
    assert cards.keys() == {"acme", "team/acme"}
    assert (cards["acme"].path, cards["acme"].versions[0].by) == (str(folder / "acme.safetensors"), "resolver")


async def test_what_is_published_again_is_served_by_the_next_request(found: Found, folder: Path) -> None:
    put(folder, "acme", "a")
    assert await found.ask("acme") == "a"
    put(folder, "acme", "b")
    assert await found.ask("acme") == "b"
    await asyncio.gather(*found.registry.versions.background)
    assert set(found.workers.resident) == {DIGEST["b"]}
    (folder / "acme.safetensors").unlink()
    assert await found.ask("acme") is None
    await asyncio.gather(*found.registry.versions.background)
    assert (found.registry.shown().data, found.workers.resident) == ([], {})


async def test_a_name_is_looked_up_once_in_a_while(found: Found, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    found.resolving._fresh = TTLCache(9, 1.0, timer=lambda: now)
    put(folder, "acme", "a")
    asked = found.calls(monkeypatch)
    assert [await found.ask("acme") for _ in range(3)] == ["a", "a", "a"]
    put(folder, "acme", "b")
    assert (await found.ask("acme"), asked) == ("a", ["acme"])
    now = 2.0
    assert (await found.ask("acme"), asked) == ("b", ["acme", "acme"])


async def test_names_that_are_missing_cost_one_look_and_nothing_is_kept_of_them(
    found: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = found.calls(monkeypatch)
    names = [f"stranger-{number}" for number in range(200)]
    for _ in range(3):
        assert set(await asyncio.gather(*(found.ask(name) for name in names))) == {None}
    assert sorted(asked) == sorted(names)
    assert len(found.resolving._missing) == 200


async def test_a_wrong_digest_costs_what_a_name_costs_that_nobody_has(
    found: Found, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "acme", "a")
    assert await found.ask("acme") == "a"
    asked, before = found.calls(monkeypatch), list(found.workers.calls)
    for model in (f"acme@{DIGEST['b']}", f"nobody@{DIGEST['b']}"):
        assert await found.ask(model) is None
    assert asked == ["acme", "nobody"]
    assert found.workers.calls == before


async def test_requests_for_one_name_share_a_look(found: Found, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "acme", "a")
    asked = found.calls(monkeypatch)
    assert await asyncio.gather(*(found.ask("acme") for _ in range(20))) == ["a"] * 20
    assert asked == ["acme"]
    assert found.workers.loads == [DIGEST["a"]]


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/etc/passwd", "a//b", "", "link"])
async def test_nothing_is_found_outside_of_the_folder(found: Found, folder: Path, name: str) -> None:
    put(folder.parent, "outside", "a")
    (folder / "link.safetensors").symlink_to(folder.parent / "outside.safetensors")
    with pytest.raises(RetryableRequestError) if name == "link" else contextlib.nullcontext():
        assert await found.ask(name) is None
    assert found.registry.shown().data == []


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "a b", "-a"])
async def test_what_cannot_be_a_name_is_not_there(found: Found, folder: Path, name: str) -> None:
    """As any other name without a bundle, whatever the resolver would say of it."""
    put(folder, "a b", "a")
    assert await found.ask(name) is None


@pytest.mark.parametrize("damage", ["half a file", "of another backbone", "forbidden", "no bundle"])
async def test_a_file_that_cannot_be_used_is_told_the_admin_alone(
    found: Found, folder: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "acme.safetensors"
    put(folder, "acme", "a")
    whole = path.read_bytes()
    if damage == "half a file":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "of another backbone":
        fingerprint = BUNDLES["a"].metadata.backbone.model_copy(update={"weights_digest": "1" * 64})
        write_bundle(remade(BUNDLES["a"], backbone=fingerprint), path)
    elif damage == "no bundle":
        path.write_text("notes")
    else:
        monkeypatch.setattr(found.resolving._resolver, "fetch", _forbidden)
    for _ in range(2):
        with pytest.raises(RetryableRequestError) as refused:
            await found.ask("acme")
        assert str(refused.value) == "memory bundle 'acme' cannot be used as it is now; please retry later"
    (line,) = (line for line in caplog.messages if "'acme' cannot be used" in line)
    assert damage != "forbidden" or "403" in line
    assert (found.registry.shown().data, found.workers.resident) == ([], {})
    monkeypatch.undo()
    path.write_bytes(whole)
    found.resolving._failed.clear()  # after a while
    assert await found.ask("acme") == "a"


def _forbidden(*_: object) -> None:
    raise PermissionError("403 Forbidden")


async def test_a_known_name_is_served_while_its_store_fails(
    found: Found, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(folder, "acme", "a")
    assert await found.ask("acme") == "a"
    (folder / "acme.safetensors").write_text("half of another")
    assert [await found.ask("acme") for _ in range(2)] == ["a", "a"]
    monkeypatch.setattr(found.resolving._resolver, "tag", _forbidden)
    found.resolving._failed.clear()
    assert await found.ask("acme") == "a"


async def test_a_store_that_hangs_makes_nobody_else_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolving, "LOOK_S", 0.3)
    put(tmp_path / "bundles", "acme", "a")
    found = Found(tmp_path, str(tmp_path / "bundles"), resolver_refresh_s=60.0)
    assert await found.ask("acme") == "a"
    going_on = threading.Event()
    monkeypatch.setattr(found.resolving._resolver, "tag", lambda name: going_on.wait())
    hanging = [asyncio.ensure_future(found.ask(f"n{number}")) for number in range(100)]
    await asyncio.sleep(0)
    assert await found.ask("acme") == "a"
    outcomes = await asyncio.gather(*hanging, return_exceptions=True)
    assert {str(outcome).partition("' ")[2] for outcome in outcomes} == {"cannot be looked up now; please retry later"}
    assert sum(thread.name == "inducekv-resolve" for thread in threading.enumerate()) <= 32
    going_on.set()
    await end(found.registry)


async def test_a_name_that_finds_no_room_is_not_looked_up_again(
    found: Found, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request waits once, and nothing is fetched anew for it."""
    monkeypatch.setattr(bringing, "WAIT_S", 0.2)
    found.workers.room = 1
    for name in "ab":
        put(folder, name, name)
    with Turn() as turn, in_turn(turn):
        assert await found.ask("a") == "a"
        asked = found.calls(monkeypatch)
        with pytest.raises(RetryableRequestError, match=r"'b' could not be loaded in 0\.2 s"):
            await found.ask("b")
    assert asked == ["b"]


async def test_many_files_that_are_read_make_nobody_else_wait(
    found: Found, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, going_on = found.registry._reader._read, threading.Event()

    def slowly(*arguments: Any) -> Any:
        assert going_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(found.registry._reader, "_read", slowly)
    names = [f"n{number}" for number in range(40)]
    for name in names:
        put(folder, name, "a")
    asking = [asyncio.ensure_future(found.ask(name)) for name in names]
    try:
        await asyncio.sleep(0.3)
        await asyncio.wait_for(asyncio.to_thread(found.registry.state.snapshot), 10)  # as every request does
    finally:
        going_on.set()
    assert set(await asyncio.gather(*asking)) == {"a"}


async def test_what_an_admin_has_loaded_is_not_looked_up(found: Found, folder: Path, tmp_path: Path) -> None:
    put(folder, "acme", "a")
    put(tmp_path, "mine", "b")
    await found.registry.load("acme", str(tmp_path / "mine.safetensors"), who="admin")
    assert await found.ask("acme") == "b"
    await found.registry.unload("acme", who="admin")
    assert await found.ask("acme") == "a"


@pytest.mark.parametrize("becomes", ["another file", "no file"])
async def test_what_an_admin_loads_during_a_look_stays(
    found: Found, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    """The look that has begun before does not take it back."""
    put(folder, "acme", "a")
    put(tmp_path, "mine", "b")
    assert await found.ask("acme") == "a"
    async with found.registry.versions.alone():  # another change
        loading = asyncio.ensure_future(found.registry.load("acme", str(tmp_path / "mine.safetensors"), replace=True))
        await asyncio.sleep(0.05)
        if becomes == "no file":
            (folder / "acme.safetensors").unlink()
        else:
            put(folder, "acme", "c")
        asking = asyncio.ensure_future(found.ask("acme"))
        await asyncio.sleep(0.2)
    await loading
    assert await asking == "b"
    assert await found.ask("acme") == "b"


async def test_what_cannot_be_served_takes_nobodys_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        put(tmp_path / "bundles", name, name)
    monkeypatch.setattr(resolving, "MAX_NAMES", 1)
    found = Found(tmp_path, str(tmp_path / "bundles"))
    assert await found.ask("a") == "a"

    def refuse(name: str, memory: object) -> None:
        raise UnsupportedModel(f"{name} needs an adapter")

    monkeypatch.setattr(found.registry._names, "check_memory", refuse)
    with pytest.raises(RetryableRequestError):
        await found.ask("b")
    assert [card.name for card in found.registry.shown().data] == ["a"]
    await end(found.registry)


async def test_found_names_make_room_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that an admin has loaded stay."""
    monkeypatch.setattr(resolving, "MAX_NAMES", 2)
    monkeypatch.setattr(names, "MAX_NAMES", 2)
    for name in "abc":
        put(tmp_path / "bundles", name, name)
    put(tmp_path, "mine", "a")
    found = Found(tmp_path, str(tmp_path / "bundles"))
    await found.registry.load("mine", str(tmp_path / "mine.safetensors"), who="admin")
    for name in "abcab":
        assert await found.ask(name) == name
        assert {card.name for card in found.registry.shown().data} == {"mine", name}
    await end(found.registry)


async def test_a_restart_knows_what_was_found(tmp_path: Path) -> None:
    put(tmp_path / "bundles", "acme", "a")
    settings = {"uri": str(tmp_path / "bundles"), "state": str(tmp_path / "state")}
    found = Found(tmp_path, **settings)
    assert await found.ask("acme") == "a"
    assert found.registry.state.kept(DIGEST["a"])[1] is None  # the resolver has it
    await end(found.registry)
    again = Found(tmp_path, **settings)
    await again.registry.start(RUN)
    assert [card.name for card in again.registry.shown().data] == ["acme"]
    assert await again.ask("acme") == "a"
    await end(again.registry)


class TestObjectStore:
    """Over fsspec, whose own file system in memory stands for an object store."""

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Found]:
        found = Found(tmp_path, "memory://bucket/bundles")
        yield found
        await end(found.registry)
        MemoryFileSystem.store.clear()

    def put(self, tmp_path: Path, name: str, content: str) -> None:
        put(tmp_path, "sent", content)
        MemoryFileSystem().put_file(str(tmp_path / "sent.safetensors"), f"/bucket/bundles/{name}.safetensors")

    async def test_what_is_fetched_is_kept_by_its_digest(self, store: Found, tmp_path: Path) -> None:
        self.put(tmp_path, "acme", "a")
        assert [await store.ask(name) for name in ("acme", "nobody")] == ["a", None]
        self.put(tmp_path, "acme", "b")
        assert await store.ask("acme") == "b"
        assert sorted(os.listdir(store.cache)) == sorted(f"{DIGEST[name]}.safetensors" for name in "ab")

    async def test_a_copy_that_is_gone_or_damaged_is_fetched_again(self, store: Found, tmp_path: Path) -> None:
        store.workers.room = 1
        for name in "ab":
            self.put(tmp_path, name, name)
        assert await store.ask("a") == "a"
        for damage in (Path.unlink, lambda path: path.write_text("other"), lambda path: None):
            assert await store.ask("b") == "b"
            damage(store.cache / f"{DIGEST['a']}.safetensors")
            assert await store.ask("a") == "a"

    async def test_half_a_file_leaves_nothing_behind(
        self, store: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.put(tmp_path, "acme", "a")

        def broken(path: str, copy: str) -> None:
            Path(copy).write_bytes(b"half")
            raise OSError("connection reset")

        with monkeypatch.context() as patch:
            patch.setattr(store.resolving._resolver._files, "get_file", broken)  # type: ignore[attr-defined]
            with pytest.raises(RetryableRequestError):
                await store.ask("acme")
        assert os.listdir(store.cache) == []
        store.resolving._failed.clear()
        assert await store.ask("acme") == "a"

    async def test_the_cache_has_a_size(self, store: Found, tmp_path: Path) -> None:
        self.put(tmp_path, "a", "a")
        size = os.path.getsize(tmp_path / "sent.safetensors")
        store.resolving._cache._max_bytes = 2 * size + size // 2
        for name in "abc":
            self.put(tmp_path, name, name)
            assert await store.ask(name) == name
        assert sorted(os.listdir(store.cache)) == sorted(f"{DIGEST[name]}.safetensors" for name in "bc")

    async def test_others_take_files_out_of_the_cache_meanwhile(
        self, store: Found, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another server that shares it, or another look of this one."""
        self.put(tmp_path, "acme", "a")
        listed = Path.glob

        def with_one_that_goes(folder: Path, pattern: str) -> list[Path]:
            return [folder / f"gone{pattern[1:]}", *listed(folder, pattern)]

        monkeypatch.setattr(Path, "glob", with_one_that_goes)
        assert await store.ask("acme") == "a"


def test_a_resolver_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        resolver_of(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="--memory-resolver nothing://x: Protocol not known: nothing"):
        resolver_of("nothing://x")
    assert isinstance(resolver_of(f"file://{tmp_path}"), FolderResolver)


def test_a_package_brings_a_resolver_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def load(self) -> Any:
            return lambda uri: ("of", uri)

    monkeypatch.setattr("server.resolvers.entry_points", lambda group, name: [Point()] if name == "shelf" else [])
    assert resolver_of("shelf://top") == ("of", "shelf://top")
