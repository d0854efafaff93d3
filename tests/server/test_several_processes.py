"""Several API processes in one event loop, over one state file; their engine's workers are imitated."""

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import RetryableRequestError

from inducekv_vllm.errors import (
    CapacityError,
    UnknownBundle,
)
from inducekv_vllm.files.audit_chain import read, verify
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from server.access import Access
from server.engines import Engines
from server.registry import BundleRegistry
from server.state import ServerState, Snapshot, StateError
from tests.bundles import FINGERPRINT
from tests.server.registries import BUNDLES, DIGEST, NAMES, RUN, Workers, end, models, write_all

pytestmark = pytest.mark.anyio
PROCESSES = 3


class Processes:
    """The registries of all API processes of a server; the first one is at 0."""

    def __init__(self, files: Path, **settings: Any) -> None:
        self.files, self.workers = files, Workers()
        self.config = InduceKVConfig(**settings)
        # Nobody's bundles are loaded from elsewhere than the folder, whichever process is asked.
        self.access = Access([str(files)])
        self.all: list[BundleRegistry] = []

    async def start(self) -> None:
        self.all = list(await asyncio.gather(*(self._start(process) for process in range(PROCESSES))))

    async def _start(self, process: int) -> BundleRegistry:
        path, keeps = self.config.state or self.files / "temporary", self.config.state is not None
        state = await asyncio.to_thread(lambda: ServerState(path, keeps_bundles=keeps, process=process))
        registry = BundleRegistry(Engines(self.workers), models(), FINGERPRINT, state, self.config)
        await registry.start(RUN)
        return registry

    async def load(self, content: str, process: int, name: str = "m", **options: Any) -> Any:
        path = str(self.files / f"{content}.safetensors")
        options = {"replace": True, "who": "admin", "access": self.access, **options}
        return await self.all[process].load(name, path, **options)

    async def served(self) -> list[str | None]:
        """What a new request gets from each process."""
        return [await self.of(process) for process in range(PROCESSES)]

    async def of(self, process: int, model: str = "m") -> str | None:
        await self.all[process].versions.follow()  # as the middleware does
        await self.all[process].bring(model)
        try:
            with self.all[process].lease(model) as lease:
                return next(each for each in NAMES if DIGEST[each] == lease.memory.digest)
        except UnknownBundle:
            return None

    async def settled(self) -> None:
        """All that is released has been released."""
        for _ in range(2):
            for registry in self.all:
                await registry.versions.follow()
                await asyncio.gather(*registry.versions.background)

    def resident(self) -> str:
        return "".join(name for name in NAMES if DIGEST[name] in self.workers.resident)

    def recorded(self) -> list[dict[str, Any]]:
        return [json.loads(record) for _, record in read(self.files / "temporary")]

    async def close(self) -> None:
        for registry in self.all:
            await end(registry)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return write_all(tmp_path, BUNDLES)


@asynccontextmanager
async def started(files: Path, **settings: Any) -> AsyncIterator[Processes]:
    processes = Processes(files, **settings)
    await processes.start()
    try:
        yield processes
    finally:
        await processes.close()


@pytest.fixture
async def processes(files: Path) -> AsyncIterator[Processes]:
    async with started(files, bundles={"m": str(files / "a.safetensors")}) as processes:
        yield processes


@pytest.mark.parametrize("asked", range(PROCESSES))
async def test_a_change_is_seen_by_all_when_it_is_acknowledged(processes: Processes, asked: int) -> None:
    assert await processes.served() == ["a", "a", "a"]
    card = await processes.load("b", asked)
    assert await processes.served() == ["b", "b", "b"]
    assert (card.digest, [v.digest for v in card.versions]) == (DIGEST["b"], [DIGEST["b"], DIGEST["a"]])
    assert (await processes.all[asked].rollback("m", who="admin")).digest == DIGEST["a"]
    assert await processes.served() == ["a", "a", "a"]
    await processes.load("c", asked, "n")
    assert await processes.all[asked].unload("n", who="admin") == DIGEST["c"]
    for each in processes.all:
        await each.versions.follow()
        assert each.card("m").path == str(processes.files / "a.safetensors")
        assert ("m" in each, "n" in each) == (True, False)
    await processes.settled()
    assert processes.resident() == "a"
    events = [(record["event"], record.get("by")) for record in processes.recorded() if record["event"] != "release"]
    changes = [("replace", "admin"), ("rollback", "admin"), ("load", "admin"), ("unload", "admin")]
    assert events == [("start", None), ("load", "start"), *changes]


async def test_no_request_sees_an_older_version_than_one_that_has_ended_before_it(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that run side by side may see either; HTTP requests wait for `follow` first."""
    answers: list[tuple[int, int, int]] = []  # when a request began and ended, and its version, counted
    moments, is_done = itertools.count(), False
    slow = processes.all[PROCESSES - 1].state
    snapshot = slow.snapshot

    def late(names: Iterable[str]) -> Snapshot:
        found = snapshot(names)
        time.sleep(0.01)  # in a thread: the others go on
        return found

    monkeypatch.setattr(slow, "snapshot", late)

    async def read(process: int) -> None:
        while not is_done:
            began, content = next(moments), await processes.of(process)
            answers.append((began, next(moments), "abc".index(str(content))))
            await asyncio.sleep(0)

    readers = [asyncio.ensure_future(read(process)) for process in range(PROCESSES)]
    for number, content in enumerate("bc", start=1):
        await processes.load(content, number % PROCESSES)
        before = next(moments)
        while before > min(began for began, *_ in answers[-PROCESSES:]):  # all have begun again
            await asyncio.sleep(0.01)
    is_done = True
    await asyncio.gather(*readers)
    ended, newest = deque(sorted((end, version) for _, end, version in answers)), 0
    for began, _, version in sorted(answers):
        while ended[0][0] < began:
            newest = max(newest, ended.popleft()[1])
        assert version >= newest
    assert {version for *_, version in answers} == {0, 1, 2}


async def test_a_version_stays_until_the_last_request_of_any_process_has_ended(processes: Processes) -> None:
    with ExitStack() as requests:
        for process in (1, 1, 2):
            requests.enter_context(processes.all[process].lease("m"))
        await processes.load("b", 0)
        await processes.settled()
        assert processes.resident() == "ab"
        running = []
        for each in processes.all:
            (draining,) = each.shown().draining
            assert draining.digest == DIGEST["a"]
            running.append(draining.active_requests)
        assert running == [0, 2, 1]
        # Loaded again in the meantime: its requests count for the name.
        await processes.load("a", 1)
        await processes.settled()
        shown = processes.all[1].shown()
        assert ([card.active_requests for card in shown.data], shown.draining) == ([2], [])
        await processes.load("c", 1)
    await processes.settled()
    assert processes.resident() == "c"
    assert [len(each.versions.pool.resident) for each in processes.all] == [1, 1, 1]


async def test_a_change_of_a_process_that_is_killed_holds_nobody_up(processes: Processes) -> None:
    """Its lock ends with it, and what it has not recorded has not happened."""
    killed = processes.all[2]
    assert killed.state.begin_change()
    load = asyncio.ensure_future(processes.load("b", 0))
    await asyncio.sleep(0.1)
    assert not load.done()
    await end(killed)
    await load
    assert [await processes.of(process) for process in (0, 1)] == ["b", "b"]
    processes.all.remove(killed)


async def test_forgetting_reaches_every_process_before_it_is_acknowledged(processes: Processes) -> None:
    traces = {content: {"digest": DIGEST[content]} for content in "ab"}
    await processes.load("b", 0)
    await processes.settled()
    for process, content in enumerate("ab"):
        await processes.all[process].journal.put_trace("owner", None, f"r-{content}", traces[content])
    assert [await each.journal.traces("owner", None, "r-a") for each in processes.all] == 3 * [[traces["a"]]]
    assert (await processes.all[1].forget("m", who="admin")).forgotten == [DIGEST["a"]]
    assert [await each.journal.traces("owner", None, "r-a") for each in processes.all] == 3 * [[]]
    assert [await each.journal.traces("owner", None, "r-b") for each in processes.all] == 3 * [[traces["b"]]]
    assert [await each.journal.traces("owner", "salt", "r-b") for each in processes.all] == 3 * [[]]


async def test_answers_and_refusals_of_all_processes_are_in_one_audit_chain(processes: Processes) -> None:
    trace = {"bundle": "m", "digest": "d", "gate": None, "entries": [], "facts": [], "shared": None}
    first, second, third = processes.all
    for number in range(3):
        await second.journal.record_answer(f"r{number}-1", "", trace)
        await first.journal.record_answer(f"r{number}-0", "", trace)
        await third.journal.note_stranger("/v1/load_memory_bundle", "10.0.0.9", "no key")
    found = [(record["event"], record.get("request")) for record in processes.recorded()[2:]]
    assert found == [
        each for n in range(3) for each in (("answer", f"r{n}-1"), ("answer", f"r{n}-0"), ("refusal", None))
    ]
    assert verify(processes.files / "temporary")[0] == len(found) + 2


async def test_a_rank_that_cannot_load_a_bundle_keeps_all_at_the_old_version(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of tensor parallelism, or two engines, of which the second has no room for b."""
    one_rank = processes.workers.collective_rpc

    async def two_ranks(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        (answer,) = await one_rank(method, args)
        if method.startswith("inducekv_load_") and DIGEST["b"] in args:
            return [answer, {"ok": False, "error": "no room", "kind": "CapacityError"}]
        return [answer, answer]

    with monkeypatch.context() as patch:
        patch.setattr(processes.workers, "collective_rpc", two_ranks)
        with pytest.raises(CapacityError, match="rank 1: no room"):
            await processes.load("b", 1)
    await processes.settled()
    assert (await processes.served(), processes.resident()) == (["a", "a", "a"], "a")
    await processes.load("b", 1)
    assert await processes.served() == ["b", "b", "b"]


async def test_a_process_that_cannot_read_the_state_serves_no_bundle(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the base model: `see_changes` is called before every request."""
    behind = processes.all[1]
    with monkeypatch.context() as patch:
        patch.setattr(behind.state, "snapshot", _unreadable)
        await processes.load("b", 0)
        await behind.versions.see_changes()
        with pytest.raises(RetryableRequestError, match="the state file cannot be read"):
            behind.lease("m").__enter__()
    await behind.versions.see_changes()
    assert await processes.served() == ["b", "b", "b"]


def _unreadable(_: Any) -> None:
    raise StateError("the state file cannot be read: disk I/O error")
