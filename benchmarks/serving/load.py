"""A load generator bounded in requests and in time: streamed chat completions at a fixed concurrency."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

REQUEST_SECONDS = 180.0


@dataclass(frozen=True)
class Timing:
    """One streamed request, in seconds; `tpot` is nan for a single token."""

    ttft: float
    tpot: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Block:
    """Requests of one method sent together."""

    timings: list[Timing]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(timing.output_tokens for timing in self.timings) / self.seconds


class RequestFailed(RuntimeError):
    """The server refused or broke off a benchmark request."""


def chat_body(model: str, messages: list[dict[str, Any]], output_tokens: int, xargs: dict[str, Any]) -> dict[str, Any]:
    """A request for exactly `output_tokens` tokens, every one of them visible in the stream."""
    return {
        "model": model,
        "messages": messages,
        "temperature": 0.0,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,  # a token whose text is not yet printable has no text in its chunk
        **({"vllm_xargs": xargs} if xargs else {}),
    }


async def stream(client: httpx.AsyncClient, body: dict[str, Any], url: str = "") -> Timing:
    """Times a request to `url` ("": the client's). Raises RequestFailed: an error, or fewer tokens than requested."""
    first = last = 0.0
    usage: dict[str, int] = {}
    start = time.perf_counter()
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            await response.aread()
            raise RequestFailed(f"HTTP {response.status_code}: {response.text[:500]}")
        async for line in response.aiter_lines():
            now = time.perf_counter()
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[len("data: ") :])
            if "error" in chunk:
                raise RequestFailed(str(chunk["error"]))
            if any(choice.get("token_ids") for choice in chunk["choices"]):
                first = first or now
                last = now
            usage = chunk.get("usage") or usage
    tokens = usage.get("completion_tokens", 0)
    if tokens != body["max_tokens"] or not first:
        raise RequestFailed(f"asked for {body['max_tokens']} tokens, got {tokens}")
    tpot = (last - first) / (tokens - 1) if tokens > 1 else float("nan")
    return Timing(first - start, tpot, usage["prompt_tokens"], tokens)


async def send_requests(requests: Sequence[tuple[str, dict[str, Any]]], concurrency: int) -> Block:
    """Sends (URL of the server, body) pairs, at most `concurrency` of them at a time, and waits for all."""
    waiting = iter(requests)
    timings: list[Timing] = []

    async def worker(client: httpx.AsyncClient) -> None:
        for url, body in waiting:  # shared by all workers: each takes the next one when it is free
            timings.append(await stream(client, body, url))

    async with httpx.AsyncClient(timeout=REQUEST_SECONDS) as client:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker(client))
        return Block(timings, time.perf_counter() - start)
