"""Pages of the resident pool, given out in regions with reference counts. Addresses never move."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from ..errors import CapacityError
from ..page_terms import IntArray


class Region:
    """Pages of one bundle. They are free again after the last `release`."""

    def __init__(self, allocator: PageAllocator, pages: IntArray) -> None:
        self.pages = pages  # [n], in the order of the bundle's tokens
        self._allocator = allocator
        self._references = 1

    @property
    def references(self) -> int:
        return self._references

    @property
    def is_free(self) -> bool:
        """Whether its pages have been erased and given back."""
        return not self._allocator.holds(self)

    def retain(self) -> None:
        with self._allocator.lock:
            assert self._references > 0, "the region is free"
            self._references += 1

    def release(self) -> None:
        with self._allocator.lock:
            assert self._references > 0, "the region is free"
            self._references -= 1
            if self._references:
                return
        self._allocator.take_back(self)


class PageAllocator:
    """Pages 0..capacity-1. Any thread may use it."""

    def __init__(self, capacity: int, erase: Callable[[IntArray], None] | None = None) -> None:
        """`erase` overwrites the content of pages [n] before they are free again."""
        if capacity < 1:
            raise ValueError(f"a pool needs a capacity of at least 1 page, found {capacity}")
        self.lock = threading.Lock()
        self._free = np.ones(capacity, dtype=bool)
        self._regions: set[Region] = set()
        self._erase = erase

    @property
    def capacity(self) -> int:
        return len(self._free)

    @property
    def num_free(self) -> int:
        return int(self._free.sum())

    def allocate(self, count: int) -> Region:
        """Take `count` pages, with one reference: the smallest run of free pages that holds them all.

        If there is no such run, take the longest ones.

        Raises:
            CapacityError: fewer pages are free. Nothing changes.
        """
        with self.lock:
            if count > self.num_free:
                raise CapacityError(f"{count} pages are needed, {self.num_free} of {self.capacity} are free")
            starts, lengths = self._free_runs()
            fitting = np.flatnonzero(lengths >= count)
            if len(fitting):
                start = starts[fitting[lengths[fitting].argmin()]]
                pages = np.arange(start, start + count)
            else:
                longest_first = np.argsort(-lengths, kind="stable")
                runs = [np.arange(starts[run], starts[run] + lengths[run]) for run in longest_first]
                pages = np.concatenate([np.empty(0, np.int64), *runs])[:count]
            self._free[pages] = False
            region = Region(self, pages)
            self._regions.add(region)
            return region

    def _free_runs(self) -> tuple[IntArray, IntArray]:
        """The first page and the length of each run of free pages."""
        edges = np.flatnonzero(np.diff(self._free.astype(np.int8), prepend=0, append=0))  # start, end, start, end ...
        starts, ends = edges[::2], edges[1::2]
        return starts, ends - starts

    def holds(self, region: Region) -> bool:
        with self.lock:
            return region in self._regions

    def take_back(self, region: Region) -> None:
        """Erase a region's pages and free them; `Region.release` calls this for the last reference."""
        if self._erase is not None:
            self._erase(region.pages)
        with self.lock:
            self._regions.remove(region)
            self._free[region.pages] = True

    def check(self) -> None:
        """Assert every invariant; tests call this after each change."""
        taken = np.concatenate([np.empty(0, np.int64), *(region.pages for region in self._regions)])
        assert len(np.unique(taken)) == len(taken)
        assert np.array_equal(np.sort(taken), np.flatnonzero(~self._free))
        assert all(region.references > 0 for region in self._regions)
