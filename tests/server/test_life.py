"""The life of a version: whatever happens in whichever phase, requests get what they ask for, and nothing is left."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import RetryableRequestError

from inducekv_vllm.errors import InduceKVError, UnknownBundle
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from server.pool import PoolSize
from server.versions import Turn
from tests.bundles import random_bundle
from tests.server.registries import Workers, begin, end, in_turn, write_all

pytestmark = pytest.mark.anyio
CONTENTS = {name: random_bundle(seed=seed) for seed, name in enumerate(("m", "next", "other", "another"))}
DIGEST = {name: bundle.digest for name, bundle in CONTENTS.items()}
LOAD, UNLOAD = "inducekv_load_bundle", "inducekv_unload_bundle"

# What a request for "m" gets that begins afterwards, and where the version is when all have ended: in the pool, in host
# memory or nowhere. The pool has room for two.
#
#   ask       a request asks for the name
#   replace   the name is to stand for another version
#   unload    the name is removed
#   crowd     others are asked for, one after the other, and need the room
#   give up   whoever waits goes away
#   fail      the workers refuse the load that runs
EVENTS = ("ask", "replace", "unload", "crowd", "give up", "fail")
TABLE = {
    "cold": ("m pool", "next nowhere", "404 nowhere", "m pool", "m pool", "m pool"),
    "coming": ("m pool", "next nowhere", "404 nowhere", "m pool", "m pool", "m pool"),
    "resident": ("m pool", "next nowhere", "404 nowhere", "m pool", "m pool", "m pool"),
    "used": ("m pool", "next nowhere", "404 nowhere", "m pool", "m pool", "m pool"),
    "leaving": ("m pool", "next nowhere", "404 nowhere", "m pool", "m pool", "m pool"),
    "draining": ("404 nowhere", "next nowhere", "404 nowhere", "404 nowhere", "404 nowhere", "404 nowhere"),
}


class Life:
    def __init__(self, folder: Path) -> None:
        self.folder, self.workers = folder, Workers(room=2)
        self.registry = begin(InduceKVConfig(), self.workers, folder / "state", PoolSize(2, 1, 20))
        self.running = Turn()  # requests
        self.waiting: list[asyncio.Task[Any]] = []

    async def load(self, *names: str) -> None:
        for name in names:
            await self.registry.load(name, str(self.folder / f"{name}.safetensors"))

    async def ask(self, name: str, turn: Turn | None = None) -> str:
        """A request, and what it is answered by; it goes on until the end of its turn."""
        with contextlib.nullcontext(turn) if turn is not None else Turn() as turn:
            try:
                with in_turn(turn):
                    await self.registry.bring(name)
                    lease = turn.enter_context(self.registry.lease(name))
            except UnknownBundle:
                return "404"
            assert lease.memory.digest in self.workers.resident
            return next(content for content, digest in DIGEST.items() if digest == lease.memory.digest)

    def begin(self, work: Awaitable[Any]) -> None:
        self.waiting.append(asyncio.ensure_future(work))

    async def is_called(self, method: str, work: Awaitable[Any]) -> None:
        """Begin what calls the workers, who do not answer yet."""
        self.workers.held[method] = asyncio.Event()
        self.workers.calls.clear()
        self.begin(work)
        while method not in self.workers.calls:
            await asyncio.sleep(0)

    async def reach(self, phase: str) -> None:
        await self.load("other", "m", "another")  # "other" has left
        if phase in ("cold", "coming"):
            await self.ask("other")  # and "m" leaves
        if phase == "coming":
            await self.is_called(LOAD, self.ask("m"))
        if phase == "leaving":
            await self.is_called(UNLOAD, self.ask("other"))
        if phase in ("used", "draining"):
            assert await self.ask("m", self.running) == "m"
        if phase == "draining":
            await self.registry.unload("m")

    async def happen(self, event: str) -> None:
        if event == "ask":
            self.begin(self.ask("m"))
        elif event == "replace":
            self.begin(self.registry.load("m", str(self.folder / "next.safetensors"), replace=True))
        elif event == "unload":
            self.begin(self.registry.unload("m"))
        elif event == "crowd":
            self.begin(self.crowd())
        elif event == "give up":
            for task in self.waiting:
                task.cancel()
        else:
            self.workers.failing = {DIGEST["m"]}

    async def crowd(self) -> None:
        for name in ("other", "another", "other"):
            assert await self.ask(name) == name

    async def end(self, phase: str) -> None:
        """The workers answer, requests end, and all that follows from it has happened."""
        for _ in range(20):
            await asyncio.sleep(0)
        for going_on in self.workers.held.values():
            going_on.set()
        outcomes = await asyncio.gather(*self.waiting, return_exceptions=True)
        self.workers.failing = set()
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                fails = isinstance(outcome, asyncio.CancelledError | RetryableRequestError)
                assert fails or (phase == "draining" and isinstance(outcome, UnknownBundle)), outcome
        assert phase not in ("used", "draining") or DIGEST["m"] in self.workers.resident
        self.running.close()
        while self.registry.versions.background:
            await asyncio.gather(*self.registry.versions.background)

    async def place(self) -> str:
        """What the server believes is what the workers have."""
        await self.registry.versions.follow()
        state = self.registry.state
        known = {digest for digest, version in self.registry.versions.pool.resident.items()}
        assert known == set(state.snapshot().resident) == set(self.workers.resident)
        named = {state.served(name).digest for name, _ in state.page("", 9)}  # type: ignore[union-attr]
        assert (known | self.workers.kept) <= named, "something is left that no name stands for"
        assert not any(version.is_used for version in self.registry.versions.pool.resident.values())
        if DIGEST["m"] in self.workers.resident:
            return "pool"
        return "host" if DIGEST["m"] in self.workers.kept else "nowhere"


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    life = Life(write_all(tmp_path, CONTENTS))
    yield life
    await end(life.registry)


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("phase", TABLE)
async def test_the_life_of_a_version(life: Life, phase: str, event: str) -> None:
    await life.reach(phase)
    await life.happen(event)
    await asyncio.wait_for(life.end(phase), 20)
    answer = await asyncio.wait_for(life.ask("m"), 20)
    while life.registry.versions.background:
        await asyncio.gather(*life.registry.versions.background)
    assert f"{answer} {await life.place()}" == TABLE[phase][EVENTS.index(event)]
    with contextlib.suppress(InduceKVError):
        await life.crowd()
    await life.place()
