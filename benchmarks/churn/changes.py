"""Who changes the bundles while requests run, and which contents a name stood for at a time."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from selector.client import Server

Content = str  # a digest; or what stands for the model without memory


@dataclass
class Span:
    """A name stood for this content from some moment between `asked` and `there` on."""

    content: Content
    asked: float
    there: float = math.inf
    left: float = math.inf  # from here on the name may stand for something else
    gone: float = math.inf  # and from here on it does


@dataclass
class Names:
    """What each name stood for, and when: as far as whoever asked for the changes can know."""

    spans: dict[str, list[Span]] = field(default_factory=dict)

    def may_be(self, name: str, begin: float, end: float) -> set[Content]:
        """The contents that a request from `begin` to `end` may have had."""
        return {span.content for span in self.spans.get(name, ()) if span.asked <= end and begin <= span.gone}

    def always_there(self, name: str, begin: float, end: float) -> bool:
        """Whether the name stood for something all the time."""
        now = begin
        for span in self.spans.get(name, ()):
            if span.there <= now < span.left:
                now = span.left
        return now >= end


class Admin:
    """Loads and unloads bundles, and keeps what names stood for."""

    def __init__(self, client: httpx.AsyncClient, key: str, paths: Mapping[Content, Path]) -> None:
        self.names = Names()
        self.loads = 0
        self._server, self._paths = Server(str(client.base_url), admin_key=key), paths

    async def load(self, name: str, content: Content) -> None:
        """Let the name stand for this content."""
        spans = self.names.spans.setdefault(name, [])
        spans.append(Span(content, time.monotonic()))
        await asyncio.to_thread(self._server.load, name, self._paths[content])
        spans[-1].there = time.monotonic()
        self.loads += 1
        for before in spans[:-1]:  # a name is never without a bundle while it is replaced
            before.left, before.gone = (min(then, spans[-1].there) for then in (before.left, before.gone))

    async def unload(self, name: str) -> None:
        """Let the name stand for nothing."""
        span = self.names.spans[name][-1]
        span.left = time.monotonic()
        await asyncio.to_thread(self._server.unload, name)
        span.gone = time.monotonic()

    async def keep_replacing(
        self, name: str, contents: Sequence[Content], every_s: float, unload: bool = False
    ) -> None:
        """Swap the content of a name again and again, until cancelled; `unload`: it is gone for a while before."""
        for content in itertools.cycle(contents):
            await asyncio.sleep(every_s)
            if unload:
                await self.unload(name)
                await asyncio.sleep(every_s / 4)
            await self.load(name, content)


@asynccontextmanager
async def meanwhile(*endless: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run these until the context ends. What has failed in one of them is raised then."""
    tasks = [asyncio.create_task(each) for each in endless]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
