"""Which versions of the pool are wanted the least: a segmented LRU.

What was asked for once is on probation, and leaves first. What is asked for again is protected. So a scan over many
names, each asked for once, throws out what else was asked for once, and leaves alone what is busy. (Karedla, Love and
Wherry, "Caching strategies to improve disk system performance", 1994.)
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

PROTECTED: Final = 0.8  # of the versions, at most: what is not busy any more goes on probation again


class Recency:
    """See the module docstring. It knows what this API process was asked for."""

    def __init__(self) -> None:
        # Both: the least recently used first.
        self._probation: dict[str, bool] = {}  # whether it was asked for since it came
        self._protected: dict[str, None] = {}

    def came(self, digest: str) -> None:
        """A version is in the pool."""
        if digest not in self._protected:
            self._probation.setdefault(digest, False)

    def used(self, digest: str) -> None:
        """A request asks for a version of the pool."""
        if not (digest in self._protected or self._probation.get(digest)):
            self._probation.pop(digest, None)
            self._probation[digest] = True
            return
        self.gone(digest)
        self._protected[digest] = None
        while len(self._protected) > max(1, PROTECTED * (len(self._protected) + len(self._probation))):
            oldest = next(iter(self._protected))
            del self._protected[oldest]
            self._probation[oldest] = True

    def gone(self, digest: str) -> None:
        """A version has left the pool."""
        self._probation.pop(digest, None)
        self._protected.pop(digest, None)

    def least_wanted(self, digests: Collection[str]) -> list[str]:
        """These versions of the pool, in the order in which they are to leave."""
        return [each for each in (*self._probation, *self._protected) if each in digests]
