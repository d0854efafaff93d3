"""The bundles of a worker: read and copied into the pool by a thread, while the worker goes on with its steps.

What was read is kept in host memory, the least recently loaded dropped first, so that a bundle that leaves the pool and
comes back is copied, and no more.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from cachetools import LRUCache

from ..attention.host_bundle import HostBundle
from ..attention.ranges import Region
from ..attention.resident_bundle import ResidentBundle
from ..errors import BundleError
from ..pace import beside_requests
from .steps import Steps

T = TypeVar("T")


class _Leaving(NamedTuple):
    """A bundle that was unloaded, and perhaps is still there."""

    loaded: Future[ResidentBundle] | None  # None: it was in host memory alone
    released: Future[None]

    @property
    def is_gone(self) -> bool:
        if not self.released.done():
            return False
        return self.loaded is None or self.loaded.exception() is not None or self.loaded.result().region.is_free


class ResidentBundles:
    """Bundles by digest. One thread calls it; loads and erasures run one after the other in another thread.

    That thread keeps the worker's priority: with a lower one, it would hold Python's lock for as long as other programs
    keep it waiting for a core, and the steps would wait for it.
    """

    def __init__(
        self,
        read: Callable[[str, str], HostBundle],
        store: Callable[[HostBundle], ResidentBundle],
        steps: Steps,
        host_bytes: int = 0,
    ) -> None:
        """
        Args:
            read: reads the bundle at a path, and checks that it has a digest.
            store: copies it into the pool.
            steps: those that the thread should leave the cores to.
            host_bytes: of what was read, so much is kept.
        """
        self._read, self._store, self._steps = read, store, steps
        self._bundles: dict[str, Future[ResidentBundle]] = {}  # loaded, failed, or on their way
        self._host: LRUCache[str, HostBundle] = LRUCache(host_bytes, lambda each: each.nbytes)  # the thread changes it
        self._leaving: dict[str, list[_Leaving]] = {}
        self._to_erase: SimpleQueue[Region] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "inducekv-load")

    def __getitem__(self, digest: str) -> ResidentBundle:
        assert self._bundles[digest].done()
        return self._bundles[digest].result()

    def __contains__(self, digest: object) -> bool:
        return digest in self.loaded

    @property
    def loaded(self) -> dict[str, ResidentBundle]:
        done = {digest: future for digest, future in self._bundles.items() if future.done()}
        return {digest: future.result() for digest, future in done.items() if future.exception() is None}

    @property
    def host_bytes(self) -> int:
        """Of what is kept in host memory."""
        return int(self._host.currsize)

    def prepare(self, work: Callable[[], object]) -> None:
        """Do before the first load, in its thread, what loads would do once. If it fails, they say why."""
        self._submit(work)

    def begin(self, path: str, digest: str) -> None:
        """Begin to load a bundle, unless it is loaded or on its way.

        Wait a moment for the end of what is copied, or for any if there are no steps. One that waits for a file to be
        read would be late by more than it waits: the thread that reads holds Python's lock.
        """
        future = self._bundles.get(digest)
        if future is None or _has_failed(future):
            is_short = digest in self._host or not self._steps.follow
            future = self._bundles[digest] = self._submit(self._load, path, digest)
            if is_short:
                wait([future], self._steps.patience)

    def outcome(self, digest: str) -> ResidentBundle | BaseException | None:
        """The bundle, or why it could not be loaded; None while it is loaded."""
        if (future := self._bundles.get(digest)) is None:
            return BundleError(f"the load of digest {digest} was given up")
        if not future.done():
            return None
        return future.exception() or future.result()

    def unload(self, digest: str, *, keep: bool = False) -> bool:
        """Drop a bundle, or its load; return whether there was one. Running requests keep its memory until they end.

        Args:
            keep: leave it in host memory, to be loaded again.
        """
        future = self._bundles.pop(digest, None)
        has_copy = future is not None and not future.cancel() and not _has_failed(future)
        if has_copy or not keep:
            # Erasing takes the time of writing. Later loads wait for it, steps do not.
            self._forget_what_has_left()
            loaded = future if has_copy else None  # the error of a load would keep what it had read
            leaving = _Leaving(loaded, self._submit(self._leave, digest, loaded, keep))
            self._leaving.setdefault(digest, []).append(leaving)
        return future is not None

    def release(self, region: Region) -> None:
        """Drop a request's reference to the region of its bundle. After the last one, the thread erases it."""
        if region.drop():
            self._to_erase.put(region)
            self._submit(self._erase)

    def is_erased(self, digest: str) -> bool:
        """Whether nothing is left of a bundle that was unloaded, but what is kept; ask until it is."""
        self._forget_what_has_left()
        return digest not in self._leaving

    def _forget_what_has_left(self) -> None:
        staying = {digest: [each for each in of if not each.is_gone] for digest, of in self._leaving.items()}
        self._leaving = {digest: of for digest, of in staying.items() if of}

    def close(self) -> None:
        """Wait for the running load and for everything that is to be erased, and begin no other load."""
        for future in self._bundles.values():
            future.cancel()
        self._thread.shutdown()

    def _submit(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        """Let the thread do it, beside the steps."""

        def run() -> T:
            with beside_requests(self._steps.go_first):
                return work(*arguments)

        return self._thread.submit(run)

    def _load(self, path: str, digest: str) -> ResidentBundle:
        self._erase()  # the load may need the room of what was released behind it
        if (host := self._host.get(digest)) is None:
            host = self._read(path, digest)
            if host.nbytes <= self._host.maxsize:
                self._host[digest] = host
        return self._store(host)

    def _leave(self, digest: str, loaded: Future[ResidentBundle] | None, keep: bool) -> None:
        if not keep:
            self._host.pop(digest, None)
        if loaded is not None and loaded.exception() is None:
            loaded.result().region.release()

    def _erase(self) -> None:
        while True:
            try:
                region = self._to_erase.get_nowait()
            except Empty:
                return
            region.erase()


def _has_failed(future: Future[ResidentBundle]) -> bool:
    return future.done() and future.exception() is not None
