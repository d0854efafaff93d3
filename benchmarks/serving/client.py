"""Streamed chat requests over HTTP, and their times."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import aiohttp

from benchmarks.serving.timing import RequestFailed, Streamed, Timing, timing

IDLE_SECONDS = 2  # after which a connection is not used again: vLLM closes one after 5, perhaps under a request
SILENCE_SECONDS = 120  # a server that sends nothing for so long has failed
FIRST_ANSWER_TOKENS = 8  # of a conversation whose second turn is measured


def session() -> aiohttp.ClientSession:
    """As many connections as there are requests."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE_SECONDS)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS)
    return aiohttp.ClientSession(timeout=timeout, connector=connector)


async def ask_together(
    client: aiohttp.ClientSession, url: str, requests: Sequence[dict[str, Any]], concurrency: int
) -> tuple[float, list[Timing], list[str]]:
    """Send the requests, `concurrency` at a time: the seconds that all of them take, their times, and what failed."""
    try:
        bodies = [await second_turn(client, url, request) for request in requests]
    except (RequestFailed, aiohttp.ClientError, TimeoutError) as error:
        return 0.0, [], [f"{type(error).__name__}: {error}"]
    places = asyncio.Semaphore(concurrency)

    async def one(data: bytes) -> Streamed:
        async with places:
            return await stream(client, url, data)

    sent = [json.dumps(body).encode() for body in bodies]
    start = time.perf_counter()
    answers = await asyncio.gather(*map(one, sent), return_exceptions=True)
    seconds = time.perf_counter() - start
    timings, failed = list[Timing](), list[str]()
    for body, answer in zip(bodies, answers, strict=True):
        try:
            if isinstance(answer, BaseException):
                raise answer
            timings.append(timing(answer, body["max_tokens"]))
        except (RequestFailed, aiohttp.ClientError, TimeoutError) as error:
            failed.append(f"{type(error).__name__}: {error}")
    return seconds, timings, failed


async def second_turn(client: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> dict[str, Any]:
    """What is measured: the request, or the turn that follows it, once the first one has been answered here."""
    body, then = request["body"], request.get("then")
    if then is None:
        return body
    first = {key: value for key, value in body.items() if not key.startswith("stream")}
    reply = await post(client, url, first | {"max_tokens": FIRST_ANSWER_TOKENS})
    answer = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
    return body | {"messages": [*body["messages"], answer, then]}


async def post(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    """The answer to a request that is not streamed. Raises RequestFailed."""
    async with client.post(f"{url}/v1/chat/completions", json=body) as response:
        await require_ok(response)
        return await response.json()


async def stream(client: aiohttp.ClientSession, url: str, data: bytes) -> Streamed:
    """The lines as they come; nothing is parsed while other requests are being timed. Raises RequestFailed."""
    headers = {"Content-Type": "application/json"}
    streamed = Streamed(time.perf_counter(), [])
    async with client.post(f"{url}/v1/chat/completions", data=data, headers=headers) as response:
        await require_ok(response)
        async for line in response.content:
            streamed.lines.append((time.perf_counter(), line))
    return streamed


async def require_ok(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        raise RequestFailed(f"HTTP {response.status}: {(await response.text())[:300]}")


async def trace(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """What the server says that memory did: whether the gate was open, and from which position it acted."""
    asked = {key: value for key, value in body.items() if not key.startswith("stream")}
    try:
        reply = await post(client, url, asked | {"vllm_xargs": {"inducekv_trace": 1}})
        found = reply["kv_transfer_params"]["inducekv"]
        return {"open": found["gate"]["open"], "start": found["start"]}
    except (RequestFailed, aiohttp.ClientError, TimeoutError, KeyError, TypeError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}
