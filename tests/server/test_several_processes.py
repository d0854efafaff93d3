"""Several API processes in one event loop: they talk over real sockets, and their engine's workers are imitated."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import RetryableRequestError

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import BundleError, CapacityError, UnknownBundle, VersionConflict
from inducekv_vllm.host.config import InduceKVConfig
from server import followers as followers_module
from server.access import Access, ChangeRefused
from server.audit import AuditLog
from server.first import handlers
from server.followers import Followers
from server.peer_registry import PeerRegistry
from server.registry import BundleRegistry
from tests.bundles import FINGERPRINT
from tests.server.test_versions import BUNDLES, DIGEST, NAMES, Workers, models

pytestmark = pytest.mark.anyio
PROCESSES = 3


class Meeting(Workers):
    """Workers that also tell the processes where to meet."""

    def __init__(self) -> None:
        super().__init__()
        self.address: str | None = None

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if method == "inducekv_meet":
            self.address = args[0] or self.address
            return [self.address]
        return await super().collective_rpc(method, args)


class Processes:
    """The registries of all API processes of a server; the first one is at 0."""

    def __init__(self, files: Path, **settings: Any) -> None:
        self.files, self.workers = files, Meeting()
        config = InduceKVConfig(audit_log=str(files / "audit.jsonl"), **settings)
        self.audit = AuditLog.of(config, None)
        self.first = BundleRegistry(
            self.workers, models(), FINGERPRINT, config, audit=self.audit, followers=Followers(PROCESSES - 1)
        )
        # Nobody's bundles are loaded from elsewhere than the folder, whichever process is asked.
        self.access = Access([str(files)])
        others = [PeerRegistry(self.workers, models(), FINGERPRINT, rank, config) for rank in range(1, PROCESSES)]
        self.followers = others
        self.all: list[BundleRegistry | PeerRegistry] = [self.first, *others]

    async def start(self) -> None:
        start = self.first.start(handlers(self.first, self.access, self.audit))
        await asyncio.gather(start, *(follower.start() for follower in self.followers))

    async def load(self, content: str, process: int, name: str = "m", **options: Any) -> Any:
        path = str(self.files / f"{content}.safetensors")
        options = {"replace": True, "who": "admin", "access": self.access, **options}
        return await self.all[process].load(name, path, **options)

    def served(self, name: str = "m") -> list[str | None]:
        """What a new request gets from each process."""
        return [self.of(process, name) for process in range(PROCESSES)]

    def of(self, process: int, model: str) -> str | None:
        try:
            with self.all[process].lease(model) as lease:
                return next(each for each in NAMES if DIGEST[each] == lease.memory.digest)
        except UnknownBundle:
            return None

    async def settled(self) -> None:
        """All that is released has been released."""
        for _ in range(3):
            await self.first.show()  # what others have said before is here
            while self.first._engine.background:
                await asyncio.gather(*self.first._engine.background)

    def resident(self) -> str:
        return "".join(name for name in NAMES if DIGEST[name] in self.workers.resident)

    def recorded(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.files / "audit.jsonl").read_text().splitlines()]

    def close(self) -> None:
        for follower in self.followers:
            follower._first.close()
        self.audit.close()
        self.first._history.close()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "bundles"
    folder.mkdir()
    for name, bundle in BUNDLES.items():
        write_bundle(bundle, folder / f"{name}.safetensors")
    return folder


@asynccontextmanager
async def started(files: Path, **settings: Any) -> AsyncIterator[Processes]:
    processes = Processes(files, **settings)
    try:
        await processes.start()
        yield processes
    finally:
        processes.close()
        await asyncio.sleep(0.05)


@pytest.fixture
async def processes(files: Path) -> AsyncIterator[Processes]:
    async with started(files, bundles={"m": str(files / "a.safetensors")}) as processes:
        yield processes


@pytest.mark.parametrize("asked", range(PROCESSES))
async def test_a_change_is_seen_by_all_when_it_is_acknowledged(processes: Processes, asked: int) -> None:
    assert processes.served() == ["a", "a", "a"]
    card = await processes.load("b", asked)
    assert processes.served() == ["b", "b", "b"]
    assert (card.digest, [v.digest for v in card.versions]) == (DIGEST["b"], [DIGEST["b"], DIGEST["a"]])
    assert (await processes.all[asked].rollback("m", who="admin")).digest == DIGEST["a"]
    assert processes.served() == ["a", "a", "a"]
    await processes.load("c", asked, "n")
    assert processes.served("n") == ["c", "c", "c"]
    assert await processes.all[asked].unload("n", who="admin") == DIGEST["c"]
    assert processes.served("n") == [None, None, None]
    await processes.settled()
    assert processes.resident() == "a"
    for each in processes.all:
        assert {card.name: card.digest for card in (await each.show()).data} == {"m": DIGEST["a"]}
        assert (await each.show_one("m", is_admin=True)).bundle.path == str(processes.files / "a.safetensors")
        assert ("m" in each, "n" in each) == (True, False)
    events = [(record["event"], record.get("by")) for record in processes.recorded() if record["event"] != "release"]
    changes = [("replace", "admin"), ("rollback", "admin"), ("load", "admin"), ("unload", "admin")]
    assert events == [("start", None), ("load", "start"), *changes]


@pytest.mark.parametrize("asked", range(PROCESSES))
async def test_a_refusal_is_the_same_everywhere_and_changes_nothing(processes: Processes, asked: int) -> None:
    before = await processes.first.show(is_admin=True)
    with pytest.raises(VersionConflict, match=f"found {DIGEST['a']}"):
        await processes.load("b", asked, expected_digest=DIGEST["c"])
    with pytest.raises(UnknownBundle):
        await processes.all[asked].unload("n", who="admin")
    with pytest.raises(BundleError, match="is not in a folder that this server loads from"):
        await processes.load("../outside", asked)
    processes.access._roots = ()
    with pytest.raises(ChangeRefused, match="no folder is allowed") as refused:
        await processes.load("b", asked)
    assert refused.value.status == 403
    assert processes.served() == ["a", "a", "a"]
    assert await processes.first.show(is_admin=True) == before


async def test_a_process_that_cannot_read_the_bundle_keeps_all_at_the_old_version(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(name: str, path: str) -> Any:
        raise BundleError(f"{path}: no such file")

    with monkeypatch.context() as patch:
        patch.setattr(processes.followers[1], "_read", unreadable)
        for asked in range(PROCESSES):
            with pytest.raises(BundleError, match=r"b\.safetensors: no such file"):
                await processes.load("b", asked)
            assert processes.served() == ["a", "a", "a"]
    await processes.settled()
    assert processes.resident() == "a"
    assert [set(each._names.versions) for each in (processes.first, *processes.followers)] == 3 * [{DIGEST["a"]}]
    assert not any(record["event"] == "replace" for record in processes.recorded())
    await processes.load("b", 0)
    assert processes.served() == ["b", "b", "b"]


async def test_no_request_sees_the_old_version_after_another_has_seen_the_new_one(processes: Processes) -> None:
    """Each reader notes what it sees, in the order of one clock; HTTP requests wait for `may_begin` first."""
    seen: list[tuple[int, str | None]] = []
    is_done = False

    async def read(process: int) -> None:
        while not is_done:
            await processes.all[process].may_begin()
            seen.append((process, processes.of(process, "m")))
            await asyncio.sleep(0)

    readers = [asyncio.ensure_future(read(process)) for process in range(PROCESSES)]
    order = "bcabca"
    for turn, content in enumerate(order):
        await processes.load(content, turn % PROCESSES)
    is_done = True
    await asyncio.gather(*readers)
    versions = [name for _, name in seen]
    steps = [name for before, name in zip(["", *versions], versions, strict=False) if name != before]
    assert steps == ["a", *order]
    assert {process for process, _ in seen} == set(range(PROCESSES))


async def test_a_version_stays_until_the_last_request_of_any_process_has_ended(processes: Processes) -> None:
    with ExitStack() as requests:
        for process in (1, 1, 2):
            requests.enter_context(processes.all[process].lease("m"))
        await processes.load("b", 0)
        await processes.settled()
        assert processes.resident() == "ab"
        for each in processes.all:
            (draining,) = (await each.show()).draining
            assert (draining.digest, draining.active_requests) == (DIGEST["a"], 3)
        # Loaded again in the meantime: nobody reads it anew, and its requests count for the name.
        await processes.load("a", 1)
        await processes.settled()
        shown = await processes.all[2].show()
        assert ([card.active_requests for card in shown.data], shown.draining) == ([3], [])
        await processes.load("c", 1)
    await processes.settled()
    assert processes.resident() == "c"
    assert [len(each._names.versions) for each in (processes.first, *processes.followers)] == [1, 1, 1]


async def test_while_a_process_is_behind_it_answers_nobody(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has paused, and then hangs: what the others acknowledge is not answered by the old version there."""
    monkeypatch.setattr(followers_module, "PAUSE_S", 0.2)
    follower, goes_on = processes.followers[0], asyncio.Event()
    told = follower._first.handlers

    async def point(**facts: Any) -> None:
        await goes_on.wait()
        await follower._point(**facts)

    async def resume() -> None:
        await goes_on.wait()
        await follower._resume()

    with monkeypatch.context() as patch:
        patch.setitem(told, "point", point)  # type: ignore[arg-type]
        patch.setitem(told, "resume", resume)  # type: ignore[arg-type]
        await processes.load("b", 0)
        assert (processes.of(0, "m"), processes.of(2, "m")) == ("b", "b")
        waits = asyncio.ensure_future(follower.may_begin())
        await asyncio.sleep(0.05)
        assert not waits.done()
        goes_on.set()
        await waits
    assert processes.served() == ["b", "b", "b"]


async def test_without_the_first_process_bundles_are_refused(processes: Processes) -> None:
    follower = processes.followers[0]
    follower._first.close()
    await asyncio.sleep(0.05)
    for refused in (processes.load("b", 1), follower.show(), follower.answer("r", "", {})):
        with pytest.raises(RetryableRequestError, match="the first API process of this server is gone"):
            await refused
    with pytest.raises(RetryableRequestError, match="is gone"):
        processes.of(1, "m")
    with pytest.raises(RetryableRequestError, match="API process 1 of this server is gone"):
        await processes.load("b", 0)  # vLLM ends the server now
    assert processes.of(0, "m") == "a"


async def test_forgetting_reaches_every_process_before_it_is_acknowledged(processes: Processes) -> None:
    forgotten: list[tuple[int, str]] = []
    for number, each in enumerate(processes.all):
        each.on_gone = lambda digest, number=number: forgotten.append((number, digest))  # type: ignore[misc]
    await processes.load("b", 0)
    await processes.settled()
    assert forgotten == []  # it is kept for a rollback
    assert (await processes.all[1].forget("m", who="admin")).forgotten == [DIGEST["a"]]
    assert sorted(forgotten) == [(number, DIGEST["a"]) for number in range(PROCESSES)]


async def test_answers_and_refusals_of_all_processes_are_in_one_audit_log(files: Path) -> None:
    trace = {"bundle": "m", "digest": "d", "gate": None, "entries": []}
    async with started(files, audit_answers=True) as processes:
        await processes.followers[0].answer("r1", "", trace)
        await processes.audit.answer("r0", "", trace)
        processes.followers[1].refusal("/v1/load_memory_bundle", None, "unknown", "no key")
        await processes.followers[1].answer("r2", "", trace)
        found = [(record["event"], record.get("request")) for record in processes.recorded()]
    assert found == [("start", None), ("answer", "r1"), ("answer", "r0"), ("refusal", None), ("answer", "r2")]


async def test_all_restart_from_one_state_folder(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no start leaves the folder in which the processes have met."""
    state, made, make = str(files / "state"), list[Path](), tempfile.mkdtemp

    def noted(**options: str) -> str:
        made.append(Path(make(**options)))
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", noted)
    async with started(files, state=state) as processes:
        await processes.load("a", 1)
        await processes.load("b", 2)
    async with started(files, state=state) as processes:
        assert processes.served() == ["b", "b", "b"]
        await processes.all[2].rollback("m", who="admin")
        assert processes.served() == ["a", "a", "a"]
    assert len(made) == 2
    assert not any(folder.exists() for folder in made)


async def test_a_rank_that_cannot_load_a_bundle_keeps_all_at_the_old_version(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of tensor parallelism, of which the second has no room for b."""
    one_rank = processes.workers.collective_rpc

    async def two_ranks(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        (answer,) = await one_rank(method, args)
        if method == "inducekv_load_outcome" and args[0] == DIGEST["b"]:
            return [answer, {"ok": False, "error": "no room", "is_full": True}]
        return [answer, answer]

    with monkeypatch.context() as patch:
        patch.setattr(processes.workers, "collective_rpc", two_ranks)
        with pytest.raises(CapacityError, match="rank 1: no room"):
            await processes.load("b", 1)
    await processes.settled()
    assert (processes.served(), processes.resident()) == (["a", "a", "a"], "a")
    await processes.load("b", 1)
    assert processes.served() == ["b", "b", "b"]
