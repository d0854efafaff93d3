"""What is left in the server afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import psutil

from benchmarks.server_process import processes_of
from inducekv_vllm.host.config import ADMIN_HEADER

DRAIN_SECONDS = 60.0
REST_SECONDS = 10.0  # clients know that a connection is closed, and bundles that they are unloaded, before the server
T = TypeVar("T")


@dataclass(frozen=True)
class Held:
    """What the server that listens at an address holds, with its children.

    Connections that this process still holds the other end of are not counted: a client that is cancelled while it
    connects leaves one open, and only its event loop ends it.
    """

    resident_mib: float
    open_files: int

    @classmethod
    def by(cls, url: str) -> Held:
        processes = [psutil.Process(pid) for pid in processes_of(url)]
        resident = sum(process.memory_info().rss for process in processes) / 2**20
        ours = {connection.laddr for connection in psutil.Process().net_connections("tcp")}
        theirs = [connection for process in processes for connection in process.net_connections("tcp")]
        to_us = sum(connection.raddr in ours for connection in theirs if connection.raddr)
        return cls(round(resident, 1), sum(process.num_fds() for process in processes) - to_us)


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


async def held_at_rest(url: str, open_files: int) -> Held:
    """Once it has at most so many files open."""

    async def look() -> Held:
        return Held.by(url)

    return await settled(look, lambda held: held.open_files <= open_files)


async def in_use_at_rest(client: httpx.AsyncClient, expected: dict[str, int]) -> dict[str, int]:
    return await settled(lambda: in_use(client), lambda found: found == expected)


async def drained(client: httpx.AsyncClient, key: str) -> None:
    """Wait until no request uses a bundle and none waits for its last request."""

    async def busy() -> list[dict[str, Any]]:
        bundles = (await client.get("/v1/memory_bundles", headers={ADMIN_HEADER: key})).json()
        return [*bundles["draining"], *(card for card in bundles["data"] if card["active_requests"])]

    left = await settled(busy, lambda found: not found, DRAIN_SECONDS)
    assert not left, f"after {DRAIN_SECONDS:.0f} s requests still use bundles: {left}"
