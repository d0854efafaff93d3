"""What is left in the server afterwards."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.server_process import processes_of
from inducekv_vllm.config import ADMIN_HEADER

DRAIN_SECONDS = 60.0
REST_SECONDS = 10.0


@dataclass(frozen=True)
class Held:
    """What all processes of a server hold."""

    resident_mib: float
    files: Counter[str]  # open files by what they are: "socket", "pipe", or a path

    @property
    def open_files(self) -> int:
        return self.files.total()

    @classmethod
    def by(cls, url: str) -> Held:
        """The server that listens at this address, with its children."""
        processes = [psutil.Process(pid) for pid in processes_of(url)]
        return cls(
            resident_mib=round(sum(process.memory_info().rss for process in processes) / 2**20, 1),
            files=Counter(kind for process in processes for kind in _open_files(process.pid)),
        )


def _open_files(pid: int) -> Iterator[str]:
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has been closed
            yield os.readlink(file).partition(":[")[0]


async def held_at_rest(url: str, open_files: int) -> Held:
    """What the server holds once it has at most so many files open, or after `REST_SECONDS`.

    It hears a moment later than its clients that a connection is closed; a handle that leaks stays. A client that hung
    up while it connected closes its end when Python collects it.
    """
    gc.collect()
    deadline = time.monotonic() + REST_SECONDS
    while (held := Held.by(url)).open_files > open_files and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return held


@dataclass(frozen=True)
class InUse:
    """What the requests and bundles of a server have on its workers, all of them together."""

    slots: int
    pool_tokens: int
    query_keys: int

    @classmethod
    async def on(cls, client: httpx.AsyncClient) -> InUse:
        """By vLLM's route for developers, which needs VLLM_SERVER_DEV_MODE=1."""
        response = await client.post("/collective_rpc", json={"method": "inducekv_stats"})
        response.raise_for_status()
        ranks = response.json()["results"]
        return cls(
            slots=sum(rank["slots_used"] for rank in ranks),
            pool_tokens=sum(rank["pool_tokens"] - rank["pool_tokens_free"] for rank in ranks),
            query_keys=sum(rank["keys_pending"] for rank in ranks),
        )


async def in_use_at_rest(client: httpx.AsyncClient, expected: InUse) -> InUse:
    """What is in use once it is what is expected, or after `REST_SECONDS`: pages are erased in the background."""
    deadline = time.monotonic() + REST_SECONDS
    while (found := await InUse.on(client)) != expected and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return found


async def follow(url: str, course: list[float], every_s: float) -> None:
    """Append the server's resident memory (MiB) again and again, until cancelled."""
    while True:
        await asyncio.sleep(every_s)
        course.append(Held.by(url).resident_mib)


async def drained(client: httpx.AsyncClient, key: str) -> dict[str, Any]:
    """The list of bundles, once no request uses one and none waits for its last request."""
    for _ in range(int(DRAIN_SECONDS / 0.2)):
        bundles: dict[str, Any] = (await client.get("/v1/memory_bundles", headers={ADMIN_HEADER: key})).json()
        if not bundles["draining"] and not any(card["active_requests"] for card in bundles["data"]):
            return bundles
        await asyncio.sleep(0.2)
    raise AssertionError(f"after {DRAIN_SECONDS:.0f} s requests still use bundles: {bundles}")
