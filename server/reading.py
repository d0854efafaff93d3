"""Bundles are read in a thread, while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from inducekv_vllm.engine.memory_index import MemoryIndex


async def read_in_thread(read: Callable[..., MemoryIndex], *arguments: object) -> MemoryIndex:
    """What `read` returns. A thread cannot be cancelled: what it reads for nobody is erased when it is there."""
    reading = asyncio.ensure_future(asyncio.to_thread(read, *arguments))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        reading.add_done_callback(_erase)
        raise


def _erase(reading: asyncio.Future[MemoryIndex]) -> None:
    if not reading.cancelled() and reading.exception() is None:
        reading.result().erase()
