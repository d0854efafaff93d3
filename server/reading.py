"""Bundles are read in a thread, while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from vllm.engine.protocol import EngineClient
from vllm.v1.engine.async_llm import AsyncLLM

from inducekv_vllm.engine.memory_index import MemoryIndex
from inducekv_vllm.pace import beside_requests


async def read_in_thread(client: EngineClient, read: Callable[..., MemoryIndex], *arguments: object) -> MemoryIndex:
    """What `read` returns, a function that leaves the cores to the client's requests."""

    def run() -> MemoryIndex:
        with beside_requests(lambda: cast(AsyncLLM, client).get_num_unfinished_requests() > 0):
            return read(*arguments)

    return await asyncio.to_thread(run)
