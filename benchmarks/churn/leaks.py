"""What is left in the server afterwards."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import psutil

from benchmarks.server_process import processes_of
from inducekv_vllm.vllm_seams.config import ADMIN_HEADER

DRAIN_SECONDS = 60.0
REST_SECONDS = 10.0  # clients know that a connection is closed, and bundles that they are unloaded, before the server
CONNECTION = "connection"
T = TypeVar("T")


@dataclass(frozen=True)
class Held:
    """What the server that listens at an address holds, with its children."""

    resident_mib: float
    open_files: Counter[str]  # by name; sockets and pipes by their kind

    @classmethod
    def by(cls, url: str) -> Held:
        processes = [psutil.Process(pid) for pid in processes_of(url)]
        resident = sum(process.memory_info().rss for process in processes) / 2**20
        ours = {connection.laddr for connection in psutil.Process().net_connections("tcp")}
        files = sum((_open_files(process, ours) for process in processes), Counter[str]())
        return cls(round(resident, 1), files)

    def more_than(self, before: Held) -> Counter[str]:
        """What is open now and was not before."""
        return self.open_files - before.open_files


def _open_files(process: psutil.Process, ours: set[Any]) -> Counter[str]:
    """What a process has open, each descriptor looked at once.

    Connections that this process still holds the other end of are left out: the server sends its spans to this process,
    and a client that is cancelled while it connects leaves a connection open, which only its event loop ends.
    """
    folder = f"/proc/{process.pid}/fd"
    found = {int(number): link for number in os.listdir(folder) if (link := _link(f"{folder}/{number}")) is not None}
    connections = {connection.fd: connection for connection in process.net_connections("tcp")}
    files: Counter[str] = Counter()
    for number, link in found.items():
        connection = connections.get(number)
        if connection is None or not link.startswith("socket:"):
            if not link.startswith("socket:") or _link(f"{folder}/{number}") == link:  # or it was closed meanwhile
                files[re.sub(r":\[\d+\]$", "", link)] += 1
        elif not connection.raddr:
            files["listening socket"] += 1
        elif connection.raddr not in ours:
            files[CONNECTION] += 1
    return files


def _link(path: str) -> str | None:
    """None: it is closed by now."""
    try:
        return os.readlink(path)
    except OSError:
        return None


async def in_use(client: httpx.AsyncClient) -> dict[str, int]:
    """What requests and bundles have on all workers, by vLLM's route for developers (VLLM_SERVER_DEV_MODE=1)."""
    response = await client.post("/collective_rpc", json={"method": "inducekv_stats"})
    ranks = response.raise_for_status().json()["results"]
    return {
        "slots": sum(rank["slots_used"] for rank in ranks),
        "pool_tokens": sum(rank["pool_tokens"] - rank["pool_tokens_free"] for rank in ranks),
        "requests_known": sum(rank["requests_known"] for rank in ranks),
    }


async def settled(look: Callable[[], Awaitable[T]], is_right: Callable[[T], bool], seconds: float = REST_SECONDS) -> T:
    """What is seen once it is right, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while not is_right(found := await look()) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return found


async def held_at_rest(url: str, before: Held | None = None) -> Held:
    """Once every connection is closed, and no more is open than before."""

    async def look() -> Held:
        return Held.by(url)

    def is_at_rest(held: Held) -> bool:
        return not (held.open_files[CONNECTION] if before is None else held.more_than(before))

    return await settled(look, is_at_rest)


async def in_use_at_rest(client: httpx.AsyncClient, expected: dict[str, int]) -> dict[str, int]:
    return await settled(lambda: in_use(client), lambda found: found == expected)


async def drained(client: httpx.AsyncClient, key: str) -> None:
    """Wait until no request uses a bundle and none waits for its last request."""

    async def busy() -> list[dict[str, Any]]:
        bundles = (await client.get("/v1/memory_bundles", headers={ADMIN_HEADER: key})).json()
        return [*bundles["draining"], *(card for card in bundles["data"] if card["active_requests"])]

    left = await settled(busy, lambda found: not found, DRAIN_SECONDS)
    assert not left, f"after {DRAIN_SECONDS:.0f} s requests still use bundles: {left}"
