"""Requests to a fleet: names under Zipf's law, a scan over all of them, strangers' names; and the verdicts."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import httpx

from .bundles import Member

TOKENS = 12  # of an answer
SETTLED_S = 3.0  # a new version is served so long after it was published; before, the one before may be
BUSY = 20  # names, the ones that are asked for the most


@dataclass(frozen=True)
class Reply:
    """How one request ended."""

    status: int
    text: str
    first_token_s: float


@dataclass
class Expected:
    """What each name answers, by when its versions were published."""

    answers: dict[str, list[tuple[float, str]]] = field(default_factory=dict)

    def publish(self, name: str, answer: str) -> None:
        self.answers.setdefault(name, []).append((time.monotonic(), answer))

    def may_be(self, name: str, began: float) -> set[str]:
        """What a request that began then may be answered with."""
        versions = self.answers[name]
        settled = [number for number, (at, _) in enumerate(versions) if at + SETTLED_S <= began]
        return {answer for _, answer in versions[settled[-1] if settled else 0 :]}


@dataclass
class Fleet:
    """The members of a fleet on a server, and what came of the requests to them."""

    client: httpx.AsyncClient
    members: list[Member]  # the most asked for first
    expected: Expected
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)  # shares of the busy names, one after the other

    async def ask(self, member: Member) -> Reply:
        """One request, and the verdict on its answer."""
        began = time.monotonic()
        reply = await request(self.client, member.name, member)
        if reply.status != 200:
            self._fault("failed", f"{member.name}: HTTP {reply.status}: {reply.text[:200]}")
        elif not any(reply.text.startswith(each) for each in self.expected.may_be(member.name, began)):
            self._fault("wrong", f"{member.name} ({member.kind}): {reply.text!r}")
        else:
            self.counts["right"] += 1
        return reply

    def _fault(self, kind: str, detail: str) -> None:
        self.counts[kind] += 1
        self.faults.append(f"{kind}: {detail}")

    async def zipf(self, requests: int, at_once: int, seed: int) -> list[Reply]:
        """So many requests; the n-th name gets a share of 1 / n."""
        weights = list(accumulate(1 / rank for rank in range(1, len(self.members) + 1)))
        rng = random.Random(seed)
        return await crowd(self.ask, rng.choices(self.members, cum_weights=weights, k=requests), at_once)

    async def scan(self, at_once: int) -> list[Reply]:
        """Each name once, in alphabetical order."""
        return await crowd(self.ask, sorted(self.members, key=lambda member: member.name), at_once)

    async def strangers(self, count: int, at_once: int) -> list[Reply]:
        """Names that nobody has."""

        async def ask(number: int) -> Reply:
            reply = await request(self.client, f"stranger-{number}", self.members[0])
            if reply.status != 404:
                self._fault("found", f"stranger-{number}: HTTP {reply.status}: {reply.text[:200]}")
            return reply

        return await crowd(ask, range(count), at_once)

    async def is_resident(self, name: str) -> bool:
        found = await self.client.get(f"/v1/memory_bundles/{name}")
        return found.status_code == 200 and bool(found.json()["is_resident"])

    async def watch(self) -> None:
        """Note once a second how many of the busy names are in the pool, until cancelled."""
        while True:
            await asyncio.sleep(1)
            states = [await self.is_resident(member.name) for member in self.members[:BUSY]]
            self.resident.append(sum(states) / len(states))

    def watched(self) -> float | None:
        """The mean of what was noted since the last time."""
        found, self.resident = self.resident, []
        return round(statistics.mean(found), 3) if found else None


async def crowd(ask: Callable[[Any], Any], wanted: Iterable[Any], at_once: int) -> list[Reply]:
    """Ask for all of these, so many at a time."""
    left: Iterator[Any] = iter(wanted)
    replies: list[Reply] = []

    async def one() -> None:
        for each in left:  # shared
            replies.append(await ask(each))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(one())
    return replies


async def request(client: httpx.AsyncClient, model: str, member: Member) -> Reply:
    """A greedy, streamed request, which a router sends where it sends the others of its name."""
    body = {"model": model, "messages": member.question, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    began, first, text = time.perf_counter(), None, ""
    headers = {"X-Session-ID": model}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            return Reply(response.status_code, (await response.aread()).decode(), time.perf_counter() - began)
        async for line in response.aiter_lines():
            if line.startswith("data: {") and (choices := json.loads(line[6:]).get("choices")):
                text += choices[0]["delta"].get("content") or ""
                if text and first is None:
                    first = time.perf_counter() - began
    return Reply(200, text, first if first is not None else time.perf_counter() - began)


def first_tokens(replies: Iterable[Reply]) -> dict[str, float | int]:
    """Milliseconds to the first token."""
    found = sorted(1e3 * reply.first_token_s for reply in replies if reply.status == 200)
    if not found:
        return {"requests": 0}
    at = {f"p{part}_ms": round(found[min(len(found) - 1, len(found) * part // 100)], 1) for part in (50, 99)}
    return {"requests": len(found), **at}
