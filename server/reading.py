"""Bundles are read in a thread, while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from vllm.engine.protocol import EngineClient
from vllm.v1.engine.async_llm import AsyncLLM

from inducekv_vllm.engine.memory import Memory
from inducekv_vllm.pace import beside_requests


async def read_in_thread(client: EngineClient, read: Callable[..., Memory], *arguments: object) -> Memory:
    """What `read` returns, a function that leaves the cores to the client's requests."""

    def run() -> Memory:
        with beside_requests(lambda: cast(AsyncLLM, client).get_num_unfinished_requests() > 0):
            return read(*arguments)

    return await asyncio.to_thread(run)
