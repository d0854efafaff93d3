"""The other API processes of a server, as the first one sees them.

With `--api-server-count N`, N processes answer requests in front of one engine. The first one has the registry: it
checks, loads and records every change, and alone decides when the engine unloads a version. The others follow it:

    prepare    each reads the bundle and compares its digest; if one fails, nothing has changed anywhere
    record     the first one has the change on the disk, in the audit log
    pause      each lets new HTTP requests wait
    point      the first one keeps the version and points its name; then the others are told
    resume     each has pointed its name, and lets requests go on; only now the change is acknowledged

So no request that begins after another one was answered by the new version is answered by the old one, whichever
processes the two reach. A process that hangs between its pause and its resume is behind, and answers nobody meanwhile.
If any of these processes ends, vLLM ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Final

from vllm.engine.protocol import EngineClient
from vllm.exceptions import RetryableRequestError

from inducekv_vllm.errors import LoadTimeout
from inducekv_vllm.host.logs import logger_of

from .peers import Handler, Link, Meeting
from .version import Version

logger = logger_of(__name__)
PAUSE_S: Final = 10.0  # a process that does not pause in this time lets the change fail


class Followers:
    """See the module docstring. It belongs to the first process's event loop; without others, nothing here waits."""

    def __init__(self, count: int = 0) -> None:
        """`count` is the number of other processes."""
        self._count = count
        self._links: dict[int, Link] = {}  # by rank
        self._joined = asyncio.Event()

    @property
    def any_left(self) -> bool:
        return any(link.is_open for link in self._links.values())

    async def meet(self, client: EngineClient, handlers: Callable[[int], Mapping[str, Handler]]) -> None:
        """Wait until all others have connected; they learn from the engine where.

        Args:
            handlers: what the process of a rank may call here.
        """
        if not self._count:
            return
        meeting = Meeting()
        try:
            await meeting.open(lambda reader, writer: self._accept(reader, writer, handlers))
            await client.collective_rpc("inducekv_meet", args=(meeting.address,))
            await self._joined.wait()
        finally:
            meeting.close()

    async def _accept(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Callable[[int], Mapping[str, Handler]],
    ) -> None:
        link = Link("an API process", {"join": lambda rank: self._join(link, rank, handlers(rank))})
        link.begin(reader, writer)

    async def _join(self, link: Link, rank: int, handlers: Mapping[str, Handler]) -> None:
        assert rank not in self._links, rank
        link.name, link.handlers = f"API process {rank}", handlers
        self._links[rank] = link
        if len(self._links) == self._count:
            self._joined.set()

    # ---- a change ----------------------------------------------------------------------------------------------

    async def prepare(self, name: str, version: Version, path: str) -> None:
        """Let every process read a version that `name` will stand for from `path`.

        Raises:
            InduceKVError: one of them cannot; call `discard`.
            RetryableRequestError: one of them is gone.
        """
        adapters = {t: [a.lora_name, a.lora_int_id, a.lora_path] for t, a in version.task_adapters.items()}
        facts = {"digest": version.memory.digest, "path": path, "resident_bytes": version.resident_bytes}

        async def ask(rank: int, link: Link) -> None:
            await link.call("prepare", name=name, adapters=adapters, **facts)
            version.holders.add(rank)

        answers = await asyncio.gather(*(ask(*each) for each in self._links.items()), return_exceptions=True)
        for answer in answers:
            if answer is not None:
                raise answer

    def discard(self, digest: str) -> None:
        """What was prepared is not served."""
        self._tell("discard", digest=digest)

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """In the block, no other process begins with a request. It ends when all have done what they were told in it.

        Raises:
            LoadTimeout: one of them has not paused in time.
            RetryableRequestError: one of them is gone.
        """
        try:
            await self._pause()
            yield
        finally:
            await self._resume()

    async def _pause(self) -> None:
        calls = [link.call("pause") for link in self._links.values()]
        if not calls:
            return
        try:
            async with asyncio.timeout(PAUSE_S):
                await asyncio.gather(*calls)
        except TimeoutError as error:
            late = ", ".join(
                link.name for link, call in zip(self._links.values(), calls, strict=True) if call.cancelled()
            )
            raise LoadTimeout(f"{late} has not answered within {PAUSE_S:g} s; nothing has changed") from error

    async def _resume(self) -> None:
        calls = {link.call("resume"): link for link in self._links.values() if link.is_open}
        if not calls:
            return
        done, late = await asyncio.wait(calls, timeout=PAUSE_S)
        for call in late:
            logger.warning("%s has not followed a change within %g s; it answers nobody", calls[call].name, PAUSE_S)
            call.cancel()
        for call in done:
            if error := call.exception():
                logger.warning("%s has not followed a change: %s", calls[call].name, error)

    def point(self, name: str, version: Version, path: str, handle_id: int) -> None:
        self._tell("point", name=name, digest=version.memory.digest, path=path, handle_id=handle_id)

    def remove(self, name: str) -> None:
        self._tell("remove", name=name)

    def gone(self, digest: str) -> None:
        """A version is neither loaded nor kept any more."""
        self._tell("gone", digest=digest)

    async def begin(self) -> None:
        """All have what the first one has, and may begin to serve."""
        await asyncio.gather(*(link.call("begin") for link in self._links.values()))

    def _tell(self, method: str, **arguments: Any) -> None:
        for link in self._links.values():
            link.tell(method, **arguments)

    # ---- questions ---------------------------------------------------------------------------------------------

    async def active(self) -> Counter[str]:
        """How many requests of other processes use each version, by digest.

        Raises:
            RetryableRequestError: one of them does not answer; so do `traces`.
        """
        found: Counter[str] = Counter()
        for answer in await self._ask("active"):
            found.update(answer)
        return found

    async def traces(self, asker: int | None, **request: Any) -> list[dict[str, Any]]:
        """What another process than the one that asks has answered a request with; empty if none has."""
        return next((traces for traces in await self._ask("traces", but=asker, **request) if traces), [])

    async def _ask(self, method: str, *, but: int | None = None, **arguments: Any) -> Iterable[Any]:
        links = [link for rank, link in self._links.items() if rank != but and link.is_open]
        try:
            async with asyncio.timeout(PAUSE_S):
                return await asyncio.gather(*(link.call(method, **arguments) for link in links))
        except TimeoutError as error:
            raise RetryableRequestError(f"an API process has not answered within {PAUSE_S:g} s") from error
