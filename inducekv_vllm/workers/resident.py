"""The bundles of a worker: read and copied into the pool by a thread, while the worker goes on with its steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TypeVar

from ..attention.ranges import Region
from ..attention.resident_bundle import ResidentBundle
from ..pace import beside_requests

T = TypeVar("T")


class ResidentBundles:
    """Bundles by digest. One thread calls it; loads and erasures run one after the other in another thread.

    That thread keeps the worker's priority: with a lower one, it would hold Python's lock for as long as other programs
    keep it waiting for a core, and the steps would wait for it.
    """

    def __init__(self, load: Callable[[str, str], ResidentBundle], is_busy: Callable[[], bool]) -> None:
        """
        Args:
            load: reads the bundle at a path, checks that it has a digest, and stores it in the pool.
            is_busy: whether there are steps that the thread should leave the cores to.
        """
        self._load, self._is_busy = load, is_busy
        self._bundles: dict[str, Future[ResidentBundle]] = {}  # loaded, failed, or on their way
        self._leaving: dict[str, list[Future[ResidentBundle]]] = {}  # unloaded, and perhaps still in the pool
        self._to_erase: SimpleQueue[Region] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, "inducekv-load")

    def __getitem__(self, digest: str) -> ResidentBundle:
        """A bundle that has been loaded."""
        assert self._bundles[digest].done()
        return self._bundles[digest].result()

    def __contains__(self, digest: object) -> bool:
        return digest in self.loaded

    @property
    def loaded(self) -> dict[str, ResidentBundle]:
        done = {digest: future for digest, future in self._bundles.items() if future.done()}
        return {digest: future.result() for digest, future in done.items() if future.exception() is None}

    def begin(self, path: str, digest: str) -> None:
        """Begin to load a bundle, and return at once. Does nothing if it is loaded or on its way."""
        future = self._bundles.get(digest)
        if future is None or (future.done() and future.exception() is not None):
            self._bundles[digest] = self._submit(self._erase_and_load, path, digest)

    def outcome(self, digest: str) -> ResidentBundle | BaseException | None:
        """The bundle, or why it could not be loaded; None while it is loaded."""
        future = self._bundles[digest]
        if not future.done():
            return None
        return future.exception() or future.result()

    def unload(self, digest: str) -> bool:
        """Drop a bundle, or its load; return whether there was one. Running requests keep its memory until they end."""
        future = self._bundles.pop(digest, None)
        if future is None:
            return False
        # A load that failed has left nothing, and its error would keep what it had read.
        if not future.cancel() and not _has_failed(future):
            # Erasing it takes the time of writing it. Later loads wait for it, steps do not.
            self._forget_what_has_left()
            self._leaving.setdefault(digest, []).append(future)
            self._submit(_release, future)
        return True

    def release(self, region: Region) -> None:
        """Drop a request's reference to the region of its bundle. After the last one, the thread erases it."""
        if region.drop():
            self._to_erase.put(region)
            self._submit(self._erase)

    def is_erased(self, digest: str) -> bool:
        """Whether nothing is left in the pool of a bundle that was unloaded; ask until it is."""
        self._forget_what_has_left()
        return digest not in self._leaving

    def _forget_what_has_left(self) -> None:
        staying = {digest: [each for each in of if not _has_left(each)] for digest, of in self._leaving.items()}
        self._leaving = {digest: of for digest, of in staying.items() if of}

    def close(self) -> None:
        """Wait for the running load and for everything that is to be erased, and begin no other load."""
        for future in self._bundles.values():
            future.cancel()
        self._thread.shutdown()

    def _submit(self, work: Callable[..., T], *arguments: object) -> Future[T]:
        """Let the thread do it, beside the steps."""

        def run() -> T:
            with beside_requests(self._is_busy):
                return work(*arguments)

        return self._thread.submit(run)

    def _erase_and_load(self, path: str, digest: str) -> ResidentBundle:
        self._erase()  # the load may need the room of what was released behind it
        return self._load(path, digest)

    def _erase(self) -> None:
        """Erase what is waiting for it."""
        while True:
            try:
                region = self._to_erase.get_nowait()
            except Empty:
                return
            region.erase()


def _has_failed(future: Future[ResidentBundle]) -> bool:
    return future.done() and future.exception() is not None


def _has_left(future: Future[ResidentBundle]) -> bool:
    return future.done() and (future.exception() is not None or future.result().region.is_free)


def _release(future: Future[ResidentBundle]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().region.release()
