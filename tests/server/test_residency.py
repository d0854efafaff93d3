"""The pool as a cache: who leaves it, who stays, and who waits; the workers are imitated, and have little room."""

import asyncio
import contextlib
import errno
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.datastructures import State
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import RetryableRequestError, VLLMError

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import CapacityError
from inducekv_vllm.files.audit_chain import read
from inducekv_vllm.frontend.served_bundle import ServedBundle
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from server import bringing, versions
from server.endpoint import bring_bundles
from server.pool import PoolSize, Recency
from server.requests import status_of
from server.schemas import Change
from server.state import StateError
from server.versions import Turn
from tests.bundles import random_bundle
from tests.server.registries import RUN, Workers, begin, end, in_turn, models, write_all

pytestmark = pytest.mark.anyio
BUNDLES = {f"n{seed}": random_bundle(seed=seed) for seed in range(8)}
LARGE = random_bundle(num_entries=10)
ROW = 20  # tokens, as many as each bundle has but this one, which has two rows; a row takes a byte
NAME_OF = {bundle.digest: name for name, bundle in {**BUNDLES, "large": LARGE}.items()}


class Pool:
    """A registry whose workers have room for three bundles."""

    def __init__(self, folder: Path, room: int = 3, pool_bytes: int | None = None, **settings: object) -> None:
        self.folder, self.workers = folder, Workers(room)
        config = InduceKVConfig(**settings)  # type: ignore[arg-type]
        size = PoolSize(pool_bytes or room, 1, ROW)
        self.registry = begin(config, self.workers, folder / "temporary", size)

    async def load(self, *names: str, pin: bool | None = None) -> None:
        for name in names:
            await self.registry.load(name, str(self.folder / f"{name}.safetensors"), who="admin", pin=pin)

    async def ask(self, *names: str) -> None:
        """A request for each, one after the other."""
        for name in names:
            with Turn() as turn:
                await self.begin(name, turn)

    async def begin(self, name: str, turn: Turn) -> None:
        """A request that runs until the end of its turn."""
        with in_turn(turn):
            await self.registry.bring(name)
        lease = turn.enter_context(self.registry.lease(name))
        assert NAME_OF[lease.memory.digest] == name
        assert lease.memory.digest in self.workers.resident

    @property
    def resident(self) -> set[str]:
        return {NAME_OF[digest] for digest in self.workers.resident}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_all(tmp_path, BUNDLES)


@pytest.fixture
async def pool(files: Path) -> AsyncIterator[Pool]:
    pool = Pool(files)
    yield pool
    await end(pool.registry)


async def test_the_least_recently_used_leaves_and_is_loaded_again_when_it_is_asked_for(pool: Pool) -> None:
    await pool.load("n0", "n1", "n2")
    await pool.ask("n1", "n0", "n2")
    await pool.load("n3")
    assert pool.resident == {"n0", "n2", "n3"}
    cards = {card.name: card for card in pool.registry.shown().data}
    assert {name for name, card in cards.items() if card.is_resident} == pool.resident
    assert pool.registry.shown().draining == []
    with pytest.raises(RetryableRequestError, match="'n1' is not in the pool"), pool.registry.lease("n1"):
        pass
    await pool.ask("n1")
    assert pool.resident == {"n1", "n2", "n3"}


async def test_a_cold_name_costs_the_workers_two_calls(pool: Pool) -> None:
    """The running steps wait for each. One lets another leave, and one loads: that there is no room is known before."""
    await pool.load("n0", "n1", "n2", "n3")
    pool.workers.calls.clear()
    await pool.ask("n0", "n1", "n1")
    assert pool.workers.calls == ["inducekv_unload_bundle", "inducekv_load_bundle"] * 2


async def test_room_is_found_by_trying_where_it_cannot_be_foreseen(files: Path) -> None:
    """As with holes in the pool, or with memory that requests still read."""
    pool = Pool(files, pool_bytes=1000)
    await pool.load("n0", "n1", "n2", "n3")
    pool.workers.calls.clear()
    await pool.ask("n0")
    assert pool.workers.calls == ["inducekv_load_bundle", "inducekv_unload_bundle", "inducekv_load_bundle"]
    assert pool.resident == {"n0", "n2", "n3"}
    await end(pool.registry)


async def test_host_memory_keeps_what_may_come_back_and_nothing_that_no_name_stands_for(pool: Pool) -> None:
    await pool.load("n0", "n1", "n2", "n3")
    assert pool.workers.kept == {BUNDLES["n0"].digest}
    await pool.registry.unload("n0")
    await asyncio.gather(*pool.registry.versions.background)
    assert pool.workers.kept == set()
    await pool.load("n4")  # n1 leaves
    await pool.registry.load("n1", str(pool.folder / "n5.safetensors"), who="admin", replace=True)
    await asyncio.gather(*pool.registry.versions.background)
    assert BUNDLES["n1"].digest not in pool.workers.kept


async def test_what_no_name_stands_for_leaves_for_good_whoever_makes_it_leave(pool: Pool) -> None:
    """A cold name may need the room before the release of a version that was just unloaded has its turn."""
    await pool.load("n3", "n0", "n1", "n2")
    async with pool.registry.versions.alone():
        unloading = asyncio.ensure_future(pool.registry.unload("n0"))
        await asyncio.sleep(0.05)
        asking = asyncio.ensure_future(pool.ask("n3"))
        await asyncio.sleep(0.05)
    await asyncio.gather(unloading, asking)
    await asyncio.gather(*pool.registry.versions.background)
    assert pool.resident == {"n1", "n2", "n3"}
    assert pool.workers.kept == {BUNDLES["n3"].digest}  # it left when n2 came
    released = [json.loads(record) for _, record in read(pool.registry.state.path)][-1]
    assert (released["event"], released["digest"], released["erased"]) == ("release", BUNDLES["n0"].digest, True)


async def test_host_memory_keeps_nothing_of_a_load_that_was_refused(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pool.load("n0", "n1", "n2", pin=True)
    unloaded, rpc = [], pool.workers.collective_rpc

    async def noted(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "inducekv_unload_bundle":
            unloaded.append(args)
        return await rpc(method, args)

    monkeypatch.setattr(pool.workers, "collective_rpc", noted)
    with pytest.raises(CapacityError):
        await pool.load("n3")
    assert unloaded == [(BUNDLES["n3"].digest, False)]


async def test_what_a_request_uses_and_what_is_pinned_stays(pool: Pool) -> None:
    await pool.load("n0", pin=True)
    await pool.load("n1", "n2")
    with Turn() as turn:
        await pool.begin("n1", turn)
        for name in ("n3", "n4", "n5", "n6"):
            await pool.load(name)
            assert pool.resident == {"n0", "n1", name}
            await pool.ask(name)
    await pool.load("n7")
    assert "n0" in pool.resident
    cards = {card.name: card.pinned for card in pool.registry.shown().data}
    assert {name for name, pinned in cards.items() if pinned} == {"n0"}


async def test_a_request_waits_for_room_and_nobody_else_does(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    await pool.load("n0", "n1", "n2", "n3")
    with Turn() as first, Turn() as others:
        for name in ("n1", "n2", "n3"):
            await pool.begin(name, first if name == "n1" else others)
        waiting = asyncio.ensure_future(pool.ask("n0"))
        await asyncio.sleep(0.05)
        await pool.ask("n1", "n2")
        with pytest.raises(CapacityError, match="no room"):
            await pool.load("n4")  # an admin is told at once
        assert not waiting.done()
        first.close()
        await waiting
        assert pool.resident == {"n0", "n2", "n3"}
        await pool.begin("n0", others)
        monkeypatch.setattr(bringing, "WAIT_S", 0.05)
        with pytest.raises(RetryableRequestError, match=r"'n1' could not be loaded in 0\.05 s"):
            await pool.ask("n1")


async def test_what_does_not_fit_beside_the_pinned_is_told_at_once(pool: Pool) -> None:
    await pool.load("n0", "n1", "n2", "n3")
    for name in ("n0", "n1", "n2"):
        await pool.registry.load(name, str(pool.folder / f"{name}.safetensors"), replace=True, pin=True)
    with pytest.raises(CapacityError, match="memory bundle 'n3' does not fit into the pool beside what is pinned"):
        await pool.ask("n3")


async def test_what_is_larger_than_the_pool_throws_nothing_out(files: Path) -> None:
    pool = Pool(files, resolver=str(files))
    write_bundle(random_bundle(num_entries=20), files / "large.safetensors")
    await pool.load("n0", "n1", "n2")
    pool.workers.calls.clear()
    told = "'large' does not fit into the pool beside what is pinned: it needs 4 bytes, and the pool has 3"
    with pytest.raises(CapacityError, match=told):
        await pool.ask("large")
    assert pool.workers.calls == []
    with pytest.raises(CapacityError, match="no room"):  # the workers say it to an admin, with all numbers
        await pool.registry.load("large", str(files / "large.safetensors"), replace=True)
    assert pool.resident == {"n0", "n1", "n2"}
    await end(pool.registry)


async def test_whoever_waits_for_room_throws_nothing_out_that_would_not_suffice(files: Path) -> None:
    pool = Pool(files, resolver=str(files))
    write_bundle(LARGE, files / "large.safetensors")
    await pool.load("n0", "n1", "n2")
    with Turn() as turn:
        await pool.begin("n0", turn)
        await pool.begin("n1", turn)
        waiting = asyncio.ensure_future(pool.ask("large"))
        await asyncio.sleep(0.2)
        assert (waiting.done(), pool.resident) == (False, {"n0", "n1", "n2"})
    await waiting
    assert "large" in pool.resident
    await end(pool.registry)


async def test_two_memories_of_a_request_that_never_fit_together_are_told_at_once(files: Path) -> None:
    pool = Pool(files, room=2)
    try:
        await pool.load("n0", pin=True)
        await pool.load("n1", "n2")
        for names in (("n1", "n2"), ("n2", "n1")):
            told = r"'n1' does not fit .* the request's other memory"
            with Turn() as turn, in_turn(turn), pytest.raises(CapacityError, match=told):
                await asyncio.wait_for(pool.registry.bring(*names), 10)
            assert pool.resident == {"n0", "n2"}
        with Turn() as turn:
            await pool.begin("n2", turn)
            alone = asyncio.ensure_future(pool.ask("n1"))  # whoever asks for one of them alone waits for its room
            await asyncio.sleep(0.05)
            assert not alone.done()
        await alone
    finally:
        await end(pool.registry)


async def test_a_large_version_gets_its_room_under_steady_load_of_small_ones(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request waits; when it has waited long, no other one begins on what is to leave for it."""
    monkeypatch.setattr(bringing, "PATIENCE_S", 0.1)
    monkeypatch.setattr(bringing, "WAIT_S", 10)
    pool, is_done = Pool(files), False
    write_bundle(LARGE, files / "large.safetensors")
    await pool.load("large", "n0", "n1", "n2")

    async def ask_on(name: str) -> None:
        while not is_done:
            with Turn() as turn:
                await pool.begin(name, turn)
                await asyncio.sleep(0.02)

    asking = [asyncio.ensure_future(ask_on(f"n{number}")) for number in range(3) for _ in range(2)]
    try:
        for number, task in enumerate(asking):  # some always run
            await asyncio.sleep(0.005 * number)
            assert not task.done()
        await pool.ask("large")
    finally:
        is_done = True
        await asyncio.gather(*asking)
    assert not [version.phase for version in pool.registry.versions.pool if version.phase != "resident"]
    await end(pool.registry)


async def test_requests_that_have_what_others_wait_for_do_not_wait_for_each_other(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests of two memories each, and room for two: one after the other."""
    monkeypatch.setattr(bringing, "WAIT_S", 5)
    pool = Pool(files, room=2)
    await pool.load("n0", "n1", "n2", "n3")
    await pool.ask("n0", "n1")

    async def both(*names: str) -> None:
        with Turn() as turn, in_turn(turn):
            await pool.registry.bring(*names)
            for name in names:
                turn.enter_context(pool.registry.lease(name))
            await asyncio.sleep(0.01)

    await asyncio.gather(both("n0", "n2"), both("n1", "n3"))
    await end(pool.registry)


async def test_a_request_is_answered_though_its_name_gets_a_cold_version_meanwhile(files: Path) -> None:
    """By the one that it has asked for: it is published anew, or replaced and evicted, before the answer begins."""
    pool = Pool(files, room=1)
    await pool.load("n0", "n1")
    with Turn() as turn:
        await pool.begin("n0", turn)
        other = await pool.registry._reader.read("n0", str(files / "n2.safetensors"), None)
        async with pool.registry._changes.making(Change.LOAD, "n0", "resolver") as made:
            await made.serve_cold(other, "tag")
        with in_turn(turn):
            lease = turn.enter_context(pool.registry.lease("n0"))
        assert NAME_OF[lease.memory.digest] == "n0"
    await asyncio.gather(*pool.registry.versions.background)
    await pool.registry.bring("n0")
    assert (pool.resident, pool.workers.kept) == ({"n2"}, {BUNDLES["n1"].digest})
    await end(pool.registry)


async def test_requests_for_one_cold_name_share_its_load(pool: Pool) -> None:
    await pool.load("n0", "n1", "n2", "n3")
    assert pool.resident == {"n1", "n2", "n3"}
    before = len(pool.workers.loads)
    given_up = asyncio.ensure_future(pool.ask("n0"))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(*(pool.ask("n0") for _ in range(20)))
    assert pool.workers.loads[before:] == [BUNDLES["n0"].digest]


async def test_many_cold_names_at_once_get_their_own(pool: Pool) -> None:
    await pool.load(*BUNDLES)
    await asyncio.gather(*(pool.ask(name) for _ in range(5) for name in BUNDLES))
    assert len(pool.workers.resident) <= 3


async def test_what_is_loaded_again_after_its_file_has_changed_is_refused(pool: Pool) -> None:
    await pool.load("n0", "n1", "n2", "n3")
    write_bundle(BUNDLES["n1"], pool.folder / "n0.safetensors")
    with pytest.raises(RetryableRequestError, match="memory bundle 'n0' cannot be loaded now"):
        await pool.ask("n0")
    await pool.ask("n1", "n2", "n3")


async def test_a_restart_loads_what_is_pinned_and_the_rest_when_it_is_asked_for(files: Path) -> None:
    state = str(files / "state")
    pool = Pool(files, state=state)
    await pool.load("n0", "n1", "n2", "n3")
    await pool.registry.load("n1", str(files / "n1.safetensors"), replace=True, pin=True)
    await end(pool.registry)
    again = Pool(files, state=state)
    await again.registry.start(RUN)
    assert again.resident == {"n1"}
    for file in files.glob("n*.safetensors"):
        file.unlink()  # the state has its own copies
    await again.ask("n0", "n1", "n2", "n3")
    await end(again.registry)


async def test_a_cold_bundle_is_read_by_the_workers_alone(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart, too."""
    state = str(files / "state")
    pool = Pool(files, state=state)
    await pool.load("n0")
    await end(pool.registry)
    again = Pool(files, state=state)
    await again.registry.start(RUN)
    monkeypatch.setattr(again.registry._reader, "_read", lambda *_: pytest.fail("it is read by the API process"))
    await again.ask("n0")
    await end(again.registry)


async def test_a_full_disk_is_said_without_a_path(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the copy of a bundle is written for the workers. Nothing stays of it."""
    pool = Pool(files, state=str(files / "state"))
    await pool.load("n0", "n1", "n2", "n3")

    def full(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(CapacityError) as refused:
            await pool.ask("n0")
    assert str(refused.value) == "bundle 'n0' cannot be copied for the workers: No space left on device"
    assert os.listdir(pool.registry._reader._folder.name) == []
    await pool.ask("n0")
    await end(pool.registry)


async def test_a_pool_that_cannot_be_recorded_is_left_as_it_was(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    await pool.load("n0", "n1", "n2", "n3")

    def full(*_: object) -> None:
        raise CapacityError("state: cannot record this; nothing changed: the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(pool.registry.state, "bring", full)
        patch.setattr(bringing, "WAIT_S", 0.2)
        with contextlib.suppress(RetryableRequestError, CapacityError):
            await pool.ask("n0")
        assert "n0" not in pool.resident
    await pool.ask("n0", "n1", "n2", "n3")


async def test_every_route_of_vllms_says_that_there_is_no_room() -> None:
    """Also those that answer all that they do not know as a bad request, such as /v1/messages."""

    async def bring(*names: str) -> None:
        raise CapacityError(f"{names[0]} does not fit")

    async def check(request: Any) -> None:
        raise AssertionError("it is not there")

    serving = SimpleNamespace(_check_model=check)
    registry: Any = SimpleNamespace(bring=bring)
    bring_bundles(State({"serving": serving}), models(), registry, cast(Any, None), InduceKVConfig())
    with pytest.raises(VLLMError) as refused:
        await serving._check_model(SimpleNamespace(model="m"))
    error = create_error_response(refused.value).error
    assert (error.code, error.type, error.message) == (507, "Insufficient Storage", "m does not fit")


async def test_the_questions_of_facts_are_read_before_vllm_renders_a_request(pool: Pool) -> None:
    """A rendered request that waits makes others lose the picture that it brings."""
    await pool.load("n0", "n1")
    happened = list[str]()

    async def check(request: Any) -> None:
        happened.append("vLLM looks")

    async def prepare(memory: ServedBundle) -> None:
        await asyncio.sleep(0)
        happened.append(memory.digest)

    serving, facts = SimpleNamespace(_check_model=check), cast(Any, SimpleNamespace(prepare=prepare))
    bring_bundles(State({"serving": serving}), pool.registry._names._models, pool.registry, facts, InduceKVConfig())
    await serving._check_model(SimpleNamespace(model="n1"))
    assert happened == [pool.registry.memory("n1").digest, "vLLM looks"]
    await serving._check_model(SimpleNamespace(model="unknown"))
    assert happened[2:] == ["vLLM looks"]


async def test_a_state_that_cannot_be_read_is_the_servers_fault(pool: Pool) -> None:
    """Not the request's, on every route; and its path is nobody's."""
    await pool.load("n0")

    async def check(request: Any) -> None:
        raise AssertionError("nobody knows what it is")

    serving = SimpleNamespace(_check_model=check)
    table = pool.registry._names._models
    bring_bundles(State({"serving": serving}), table, pool.registry, cast(Any, None), InduceKVConfig())
    pool.registry.state._watch.close()
    with pytest.raises(VLLMError) as refused:
        await serving._check_model(SimpleNamespace(model="n1"))
    error = create_error_response(refused.value).error
    assert (error.code, str(pool.folder) in error.message) == (503, False)
    with pytest.raises(RetryableRequestError, match="the state file cannot be read"), pool.registry.lease("n0"):
        pass
    with pytest.raises(RetryableRequestError, match="the state file cannot be read"):
        assert "n0" in table.lora_requests
    assert status_of(StateError("it cannot be written")) == 503


def test_what_takes_no_room_in_the_pool_does_not_leave_it(files: Path) -> None:
    """Nobody would gain any by that: bundles of facts alone stay."""
    pool, memory = versions.Pool(PoolSize()), ServedBundle.from_bundle(LARGE, str(files))
    for digest, nbytes in (("a", 1), ("facts", 0)):
        pool.came(digest, memory, nbytes)
    assert [version.digest for version in pool.least_wanted()] == ["a"]


def test_a_scan_leaves_alone_what_is_busy() -> None:
    """Room for 100 versions: 40 busy ones get every other request; a scan asks for 10,000 others, each once."""
    recency, hits = Recency(), 0
    resident: dict[str, int] = {}
    for number in range(20_000):
        wanted = str(number // 2 % 40) if number % 2 else f"scan{number}"
        if wanted in resident:
            hits += 1
        elif len(resident) >= 100:
            gone = recency.least_wanted(resident)[0]
            del resident[gone]
            recency.gone(gone)
        resident[wanted] = 1
        recency.came(wanted)
        recency.used(wanted)
    assert hits == 10_000 - 40
