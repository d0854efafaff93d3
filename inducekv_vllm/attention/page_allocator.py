"""Pages of the resident pool, and which contents lie in them. Addresses never move.

A *content* is what lies in some tokens of the pool: an entry's payload and maps, or the null token of a group. Those of
a bundle form a *region*. Regions share contents: a content is overwritten when the last region that has it is released,
and a page is free when nothing lies in it any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np

from ..errors import CapacityError
from ..page_terms import IntArray


class Content:
    """What lies in some tokens. `key` is what others find it by, equal for equal bits; None: it is not shared."""

    __slots__ = ("key", "regions", "tokens")

    def __init__(self, tokens: IntArray, key: Hashable = None) -> None:
        self.tokens = tokens  # [n] places in the pool
        self.key = key
        self.regions = 1  # how many have it


class Region:
    """The contents of one bundle. They are released together, after the last `release`."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._references = 1
        self.contents: dict[Content, None] = {}  # in order

    @property
    def references(self) -> int:
        return self._references

    @property
    def is_free(self) -> bool:
        """Whether what it alone had has been erased, and its pages given back."""
        return not self._allocator.holds(self)

    def share(self, keys: Iterable[Hashable]) -> Mapping[Hashable, Content]:
        """Keep the contents of these keys that are in the pool already, and return them by key."""
        return self._allocator.share(self, keys)

    def allocate(self, count: int) -> IntArray:
        """Take `count` free pages, and return them; until `divide`, all that lies in them is one content.

        Raises:
            CapacityError: fewer pages are free. Nothing changes.
        """
        return self._allocator.allocate(self, count)

    def divide(self, pieces: Sequence[tuple[Hashable, IntArray]]) -> None:
        """Call once, when what was allocated is written: from now on others may share these pieces by their keys.

        What is in no piece remains one content.
        """
        self._allocator.divide(self, pieces)

    def retain(self) -> None:
        with self._allocator.lock:
            assert self._references > 0, "the region is free"
            self._references += 1

    def release(self) -> None:
        """Drop a reference. The last one erases what only this region has, which takes the time of writing it."""
        if self.drop():
            self.erase()

    def drop(self) -> bool:
        """Drop a reference, and return whether it was the last one: then somebody must call `erase`, once."""
        with self._allocator.lock:
            assert self._references > 0, "the region is free"
            self._references -= 1
            return not self._references

    def erase(self) -> None:
        """Erase what only this region has, and free its pages."""
        assert not self._references, "the region is in use"
        self._allocator.take_back(self)


class PageAllocator:
    """Pages 0..capacity-1 of `page_tokens` tokens. Any thread may use it."""

    def __init__(self, capacity: int, page_tokens: int = 1, erase: Callable[[IntArray], None] | None = None) -> None:
        """`erase` overwrites tokens [n], ascending, before they belong to no content."""
        if capacity < 1:
            raise ValueError(f"a pool needs a capacity of at least 1 page, found {capacity}")
        self.lock = threading.Lock()
        self.page_tokens = page_tokens
        self._tokens_in_use = np.zeros(capacity, dtype=np.int64)  # of each page
        self._regions: set[Region] = set()
        self._by_key: dict[Hashable, Content] = {}
        self._erase = erase

    @property
    def capacity(self) -> int:
        return len(self._tokens_in_use)

    @property
    def num_free(self) -> int:
        return int((self._tokens_in_use == 0).sum())

    def region(self) -> Region:
        """An empty region, with one reference."""
        region = Region(self)
        with self.lock:
            self._regions.add(region)
        return region

    def holds(self, region: Region) -> bool:
        with self.lock:
            return region in self._regions

    def pages_of(self, tokens: IntArray) -> IntArray:
        """The pages of tokens [n], each once."""
        return np.unique(tokens // self.page_tokens)

    # ---- what regions call -------------------------------------------------------------------------------------

    def share(self, region: Region, keys: Iterable[Hashable]) -> dict[Hashable, Content]:
        with self.lock:
            found = {key: content for key in keys if (content := self._by_key.get(key)) is not None}
            for content in found.values():
                if content not in region.contents:
                    region.contents[content] = None
                    content.regions += 1
            return found

    def allocate(self, region: Region, count: int) -> IntArray:
        """The smallest run of free pages that holds them all; if there is no such run, the longest ones."""
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
            self._tokens_in_use[pages] = self.page_tokens
            region.contents[Content(places(pages, self.page_tokens))] = None
            return pages

    def _free_runs(self) -> tuple[IntArray, IntArray]:
        """The first page and the length of each run of free pages."""
        is_free = (self._tokens_in_use == 0).astype(np.int8)
        edges = np.flatnonzero(np.diff(is_free, prepend=0, append=0))  # start, end, start, end ...
        starts, ends = edges[::2], edges[1::2]
        return starts, ends - starts

    def divide(self, region: Region, pieces: Sequence[tuple[Hashable, IntArray]]) -> None:
        (whole,) = (content for content in region.contents if content.key is None)
        tokens = [tokens for _, tokens in pieces]
        rest = np.setdiff1d(whole.tokens, np.concatenate([np.empty(0, np.int64), *tokens]))
        assert len(rest) + sum(map(len, tokens)) == len(whole.tokens), "pieces overlap, or lie elsewhere"
        contents = [Content(piece, key) for key, piece in (*pieces, (None, rest))]
        with self.lock:  # running steps wait for it
            del region.contents[whole]
            region.contents |= dict.fromkeys(contents)
            for content in contents:
                # Of equal entries of one bundle, one is found.
                if content.key is not None and self._by_key.setdefault(content.key, content) is not content:
                    content.key = None

    def take_back(self, region: Region) -> None:
        """Erase what no other region has, and free the pages in which nothing is left.

        `Region.erase` calls this, after the last reference.
        """
        with self.lock:
            for content in region.contents:
                content.regions -= 1
            gone = [content for content in region.contents if not content.regions]
            for content in gone:
                self._by_key.pop(content.key, None)  # from here on nobody shares it
        tokens = np.sort(np.concatenate([np.empty(0, np.int64), *(content.tokens for content in gone)]))
        if self._erase is not None:
            self._erase(tokens)
        with self.lock:
            self._regions.remove(region)
            self._tokens_in_use -= np.bincount(tokens // self.page_tokens, minlength=self.capacity)

    # ---- tests -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant; tests call this after each change, while nothing is erased."""
        counted: dict[Content, int] = {}
        for region in self._regions:
            assert region.references > 0
            for content in region.contents:
                counted[content] = counted.get(content, 0) + 1
        assert all(content.regions == count for content, count in counted.items())
        tokens = np.concatenate([np.empty(0, np.int64), *(content.tokens for content in counted)])
        assert len(np.unique(tokens)) == len(tokens), "a token belongs to two contents"
        in_use = np.bincount(tokens // self.page_tokens, minlength=self.capacity)
        assert np.array_equal(in_use, self._tokens_in_use)
        assert all(content in counted and content.key == key for key, content in self._by_key.items())
        assert self._by_key.keys() == {content.key for content in counted} - {None}


def places(pages: IntArray, unit: int) -> IntArray:
    """The places of these pages of `unit` places each."""
    return (pages[:, None] * unit + np.arange(unit)).reshape(-1)
