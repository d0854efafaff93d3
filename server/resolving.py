"""Bundles that nobody has loaded: looked up by name when a request asks for them, with a resolver (`resolvers.py`).

- What is found is checked like any load, and recorded. It is cold then (`residency.py`).
- A name that was found is looked up again, at most once in `resolver_refresh_s`: the next request after that gets what
  has been published since. A name that an admin has loaded is not looked up.
- What is missing, and what has failed, is remembered for `MISS_S`: a stranger's names cost one look each, and a store
  that hangs costs `LOOK_S` each time.
- Requests for one name share a look.
"""

import asyncio
import contextlib
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

from cachetools import TTLCache
from vllm.exceptions import RetryableRequestError

from inducekv_vllm.errors import VersionConflict
from inducekv_vllm.vllm_seams.config import InduceKVConfig
from inducekv_vllm.vllm_seams.logs import logger_of

from .access import Access
from .changes import Changes, Transaction
from .metrics import FAILED, FOUND, LOOKS, MISSING, SAME
from .names import MAX_NAMES, can_be_name
from .reader import BundleReader, Checked
from .resolvers import SUFFIX, MemoryResolver, can_be_resolved
from .schemas import Change

logger = logger_of(__name__)
T = TypeVar("T")
RESOLVER: Final = "resolver"  # who loads what a request has asked for by name
REMEMBERED: Final = 10_000  # names that are missing, have failed, or were looked up a moment ago, of each
MISS_S: Final = 5.0  # so long a name is not looked up again that is missing or has failed
LOOK_S: Final = 30.0  # so long a look may take, and as long what it fetches
AT_ONCE: Final = 32  # calls of the resolver


class Resolving:
    """See the module docstring. It belongs to the event loop of its API process."""

    def __init__(
        self,
        resolver: MemoryResolver,
        changes: Changes,
        reader: BundleReader,
        config: InduceKVConfig,
    ) -> None:
        self._resolver, self._changes, self._reader = resolver, changes, reader
        self._versions, self._state = changes.versions, changes.versions.state
        self._cache = DiskCache(Path(default_cache()), config.resolver_cache_bytes)
        self._free = asyncio.Semaphore(AT_ONCE)
        self._looking: dict[str, asyncio.Task[None]] = {}
        self._missing: TTLCache[str, None] = TTLCache(REMEMBERED, MISS_S)
        self._failed: TTLCache[str, str] = TTLCache(REMEMBERED, MISS_S)
        self._fresh: TTLCache[str, None] = TTLCache(REMEMBERED, config.resolver_refresh_s)

    async def look(self, name: str) -> None:
        """Let a name stand for what the resolver has of it now, or for nothing if it has nothing.

        If that cannot be found out, a name that was found before keeps what it stands for.

        Raises:
            RetryableRequestError: it cannot be found out, and the name stands for nothing; the log says why.
        """
        served = self._state.find(name)
        if (served is not None and served.tag is None) or name in self._missing or name in self._fresh:
            return
        if name not in self._failed:
            if name not in self._looking:
                self._looking[name] = self._versions.in_background(self._look(name))
                self._looking[name].add_done_callback(lambda _: self._looking.pop(name))
            await asyncio.shield(self._looking[name])
        if name in self._failed and self._state.find(name) is None:
            raise RetryableRequestError(f"memory bundle {name!r:.200} {self._failed[name]}; please retry later")

    async def look_again(self, name: str) -> bool:
        """`look`, at a name whose file cannot be read, as if nothing were known of it; False if it was not found."""
        served = self._state.find(name)
        if served is None or served.tag is None:
            return False
        await asyncio.to_thread(self._state.forget_tag, name)
        self._fresh.pop(name, None)
        await self.look(name)
        return True

    async def _look(self, name: str) -> None:
        what = "cannot be looked up now"
        try:
            is_path = can_be_name(name) and can_be_resolved(name)
            tag = await self._apart(self._resolver.tag, name) if is_path else None
            served = self._state.find(name)
            outcome = SAME
            if tag is None:
                outcome = MISSING
                self._missing[name] = None
                if served is not None:
                    async with self._changing(Change.UNLOAD, name) as made:
                        await made.unload()
            elif served is None or served.tag != tag:
                outcome, what = FOUND, "cannot be used as it is now"
                await self._take(name, tag)
            self._fresh[name] = None
            LOOKS.labels(outcome).inc()
        except Exception as error:  # whatever a resolver raises
            reason = f"no answer in {LOOK_S:g} s" if isinstance(error, TimeoutError) else str(error) or repr(error)
            logger.warning("memory bundle %.200r %s: %.1000s", name, what, " ".join(reason.split()))
            self._failed[name] = what
            LOOKS.labels(FAILED).inc()

    async def _take(self, name: str, tag: str) -> None:
        """Fetch, check and publish what the resolver has of a name. Nothing is left of what is refused."""
        copy = await asyncio.to_thread(self._cache.begin)
        try:
            path = await self._apart(self._resolver.fetch, name, copy)
            checked = await self._reader.read(name, str(path), Access([str(path.parent)]), keep=False)
            if path == copy:
                checked = await asyncio.to_thread(self._cache.keep, copy, checked)
        finally:
            await asyncio.to_thread(copy.unlink, missing_ok=True)
        async with self._changing(Change.LOAD, name, bounded=False) as made:
            self._changes.names.check_memory(name, checked.memory)
            await self._make_place(name)
            self._changes.names.check_name(name, replace=True)
            await made.serve_cold(checked, tag)

    @contextlib.asynccontextmanager
    async def _changing(self, change: Change, name: str, *, bounded: bool = True) -> AsyncIterator[Transaction]:
        """`Changes.making`, unless somebody else has loaded the name since it was looked up."""
        async with self._changes.making(change, name, RESOLVER, bounded=bounded) as made:
            if (served := self._state.find(name)) is not None and served.tag is None:
                raise VersionConflict(f"memory bundle {name!r} was loaded by somebody else since it was looked up")
            yield made

    async def _make_place(self, name: str) -> None:
        """If there are too many names for another one, that goes which was found first."""
        is_new = self._state.find(name) is None
        if is_new and self._state.num_names() >= MAX_NAMES and (first := self._state.found_first()):
            self._versions.release(await asyncio.to_thread(self._state.unload, first, RESOLVER))

    async def _apart(self, call: Callable[..., T], *arguments: object) -> T:
        """Call what may hang in a thread of its own, which nothing waits for at the end. Raises TimeoutError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def end(result: T | None, error: BaseException | None) -> None:
            self._free.release()
            if answer.done():  # nobody waits any more
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, error = None, None
            try:
                result = call(*arguments)
            except BaseException as found:
                error = found
            loop.call_soon_threadsafe(end, result, error)

        async with asyncio.timeout(LOOK_S):
            await self._free.acquire()
            threading.Thread(target=run, name="inducekv-resolve", daemon=True).start()
            return await answer


class DiskCache:
    """What was fetched from elsewhere, in a folder, named by digest. Several servers may share it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes

    def begin(self) -> Path:
        """A place for a copy. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(prefix=".fetched-", suffix=SUFFIX, dir=self._folder)
        os.close(descriptor)
        return Path(path)

    def keep(self, copy: Path, checked: Checked) -> Checked:
        """A checked copy gets its place, and those that have been there the longest go. Raises OSError."""
        place = self._folder / f"{checked.memory.digest}{SUFFIX}"
        os.replace(copy, place)
        kept = sorted(self._kept())
        total = sum(size for _, size, _ in kept)
        for _, size, file in kept:
            if total <= self._max_bytes or file == place:
                break
            file.unlink(missing_ok=True)
            total -= size
        return checked.at(str(place))

    def _kept(self) -> Iterator[tuple[float, int, Path]]:
        """Since when each file is there, its bytes, and its path. Others may take one away at any moment."""
        for file in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                found = file.stat()
                yield found.st_mtime, found.st_size, file


def default_cache() -> str:
    """The folder of the user's caches."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "inducekv")
