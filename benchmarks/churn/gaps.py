"""The time between tokens, without changes and with one a second, in turns."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import httpx
import numpy as np

from benchmarks.chat import Message
from benchmarks.serving.load import chat_body

from .changes import Admin, meanwhile
from .contents import Content

STREAMS = 4  # at a time
TOKENS = 64
SWAP_EVERY_S = 1.0


@dataclass
class Gaps:
    """Seconds between the tokens of streams."""

    seconds: list[float] = field(default_factory=list)

    def percentile(self, which: float) -> float:
        return float(np.percentile(self.seconds, which))


async def measure(
    client: httpx.AsyncClient,
    admin: Admin,
    questions: Sequence[list[Message]],
    streamed: str,
    swapped: str,
    contents: Sequence[Content],
    turns: int,
    turn_s: float,
) -> dict[str, dict[str, float]]:
    """Stream answers of one name while another is swapped or is left alone; in turns, so that both meet the same noise.

    Returns:
        Milliseconds and their ratio for p50 and p99, {"p99": {"quiet": ..., "swaps": ..., "ratio": ...}, ...}, and
        "swaps": how many there were, and how many seconds they took in the median.
    """
    gaps = {"quiet": Gaps(), "swaps": Gaps()}
    loads_before = len(admin.seconds)
    for turn in range(2 * turns):
        kind = ("quiet", "swaps")[turn % 2]
        swaps = [admin.keep_replacing(swapped, contents, SWAP_EVERY_S)] if kind == "swaps" else []
        until = time.monotonic() + turn_s
        async with meanwhile(*swaps), asyncio.TaskGroup() as group:
            for number in range(STREAMS):
                group.create_task(_stream_until(client, streamed, questions[number::STREAMS], until, gaps[kind]))
    loads = admin.seconds[loads_before:]
    found = {"swaps": {"count": len(loads), "median_s": round(median(loads), 2)}} if loads else {}
    for which in (50, 99):
        quiet, swapped_ms = (1000 * gaps[kind].percentile(which) for kind in ("quiet", "swaps"))
        ratio = swapped_ms / quiet
        found[f"p{which}"] = {"quiet": round(quiet, 2), "swaps": round(swapped_ms, 2), "ratio": round(ratio, 3)}
    return found


async def _stream_until(
    client: httpx.AsyncClient, model: str, questions: Sequence[list[Message]], until: float, gaps: Gaps
) -> None:
    number = 0
    while time.monotonic() < until:
        body = chat_body(model, questions[number % len(questions)], TOKENS, {})
        number += 1
        before = 0.0
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: {") or not json.loads(line[len("data: ") :])["choices"]:
                    continue
                now = time.monotonic()
                if before:
                    gaps.seconds.append(now - before)
                before = now
