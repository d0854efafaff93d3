"""Which names are being loaded, and how the last change of each failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

from cachetools import FIFOCache

from inducekv_vllm.errors import InduceKVError, TooManyChanges, UnknownBundle, VersionConflict

from .schemas import MemoryFailure

KEPT: Final = 256  # names without a bundle whose last failure or last version is remembered
LOADING: Final = frozenset({"load", "rollback", "restore"})
# They say nothing about the bundle.
PASSING: Final = (TooManyChanges, UnknownBundle, VersionConflict)


class Readiness:
    """It belongs to the server's event loop."""

    def __init__(self) -> None:
        self._loading: Counter[str] = Counter()
        self._failures: FIFOCache[str, MemoryFailure] = FIFOCache(KEPT)
        self._unloaded: FIFOCache[str, str] = FIFOCache(KEPT)

    @contextmanager
    def change(self, change: str, name: str) -> Iterator[None]:
        """Follow one change of a name to its end."""
        self._loading[name] += change in LOADING
        try:
            yield
        except InduceKVError as error:
            if not isinstance(error, PASSING):
                self._failures.pop(name, None)  # so that the newest ones are kept
                self._failures[name] = MemoryFailure(change=change, reason=str(error), at=datetime.now(UTC))
            raise
        else:
            self._failures.pop(name, None)
        finally:
            self._loading[name] -= change in LOADING
            self._loading += Counter()  # drops those at 0

    def unloaded(self, name: str, digest: str) -> None:
        self._unloaded.pop(name, None)
        self._unloaded[name] = digest

    def is_loading(self, name: str) -> bool:
        return self._loading[name] > 0

    def failure(self, name: str) -> MemoryFailure | None:
        """How the last change of a name failed; None if it did not."""
        return self._failures.get(name)

    def last_digest(self, name: str) -> str | None:
        """The version that a name stood for when it was unloaded."""
        return self._unloaded.get(name)
