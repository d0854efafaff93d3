"""The tokens of the resident pool, and which contents lie in them. Addresses never move.

A *content* is what lies in some tokens of the pool: an entry's payload and maps, or the null token of a group. Those of
a bundle form a *region*. Regions share contents: a content is overwritten, and its tokens are free, when the last
region that has it is released.

A row of a map takes a *page*: G adjacent tokens that begin at a multiple of G. Other tokens may lie anywhere. Contents
never move, so tokens that stay while their neighbours leave could keep every page from being free. Therefore tokens are
adjacent only as long as no more pages have tokens than if the regions shared nothing; beyond that, they fill pages that
are partly in use. A pool that has room for regions that share nothing, the most tokens and the most rows that they ever
have together, has room for whatever they share.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..errors import CapacityError
from ..retrieval.page_terms import IntArray

BoolArray = npt.NDArray[np.bool_]


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
        self.token_pages = 0  # that its tokens, without rows of maps, would take if it shared nothing
        self.contents: dict[Content, None] = {}  # in order

    @property
    def references(self) -> int:
        return self._references

    @property
    def is_free(self) -> bool:
        """Whether what it alone had has been erased, and its tokens given back."""
        return not self._allocator.holds(self)

    def share(self, keys: Iterable[Hashable]) -> Mapping[Hashable, Content]:
        """Keep the contents of these keys that are in the pool already, and return them by key."""
        return self._allocator.share(self, keys)

    def allocate(self, *groups: int, rows: int = 0, shared: int = 0) -> tuple[IntArray, IntArray]:
        """Take free tokens and pages; until `divide`, all that lies in them is one content.

        Args:
            groups: the tokens of each group. They lie adjacent if there is room: all, otherwise those of a group.
            rows: of maps.
            shared: how many tokens, without rows of maps, it shares.

        Returns:
            The tokens, group after group [n], and the pages of the rows [rows].

        Raises:
            CapacityError: there is no room. Nothing changes.
        """
        return self._allocator.allocate(self, groups, rows, shared)

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
    """Tokens 0..n-1, in `capacity` pages of `page_tokens` tokens. Any thread may use it."""

    def __init__(self, capacity: int, page_tokens: int = 1, erase: Callable[[IntArray], None] | None = None) -> None:
        """`erase` overwrites tokens [n], ascending, before they belong to no content."""
        if capacity < 1:
            raise ValueError(f"a pool needs a capacity of at least 1 page, found {capacity}")
        self.lock = threading.Lock()
        self.page_tokens = page_tokens
        self._is_used = np.zeros((capacity, page_tokens), dtype=bool)  # [pages, G]
        self._has_row = np.zeros(capacity, dtype=bool)  # [pages]
        self._regions: set[Region] = set()
        self._by_key: dict[Hashable, Content] = {}
        self._erase = erase

    @property
    def capacity(self) -> int:
        """In tokens."""
        return self._is_used.size

    @property
    def num_free(self) -> int:
        """Tokens that nothing lies in."""
        return int((~self._is_used).sum())

    @property
    def num_free_pages(self) -> int:
        """Pages that nothing lies in."""
        return int(self._free_pages().sum())

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

    def allocate(self, region: Region, groups: Sequence[int], rows: int, shared: int) -> tuple[IntArray, IntArray]:
        with self.lock:
            count, G = sum(groups), self.page_tokens
            if count + rows * G > self.num_free or rows > self.num_free_pages:
                raise CapacityError(
                    f"{count + rows * G} tokens are needed, {rows} times {G} of them as pages; {self.num_free} of "
                    f"{self.capacity} are free, with {self.num_free_pages} pages"
                )
            token_pages = -(-(count + shared) // G)
            most_pages = token_pages + sum(each.token_pages for each in self._regions)
            tokens, pages = self._adjacent(groups, rows, most_pages) or self._packed(groups, rows)
            self._is_used.reshape(-1)[tokens] = True
            self._is_used[pages] = True
            self._has_row[pages] = True
            region.token_pages = token_pages
            region.contents[Content(np.concatenate([tokens, places(pages, G)]))] = None
            return tokens, pages

    def _adjacent(self, groups: Sequence[int], rows: int, most_pages: int) -> tuple[IntArray, IntArray] | None:
        """Tokens in the runs that fit best, unless too few pages are left or more than `most_pages` have tokens."""
        runs = _FreeRuns(~self._is_used.reshape(-1))
        tokens = runs.take(sum(groups)) if runs.longest >= sum(groups) else _joined([runs.take(n) for n in groups])
        is_free = self._free_pages()
        is_free[tokens // self.page_tokens] = False
        if is_free.sum() < rows or (~is_free & ~self._has_row).sum() > most_pages:
            return None
        return tokens, _FreeRuns(is_free).take(rows)

    def _packed(self, groups: Sequence[int], rows: int) -> tuple[IntArray, IntArray]:
        """Tokens in pages that are partly in use, and in free ones when no others are left. It finds all the room."""
        is_free = self._free_pages()
        pages = _FreeRuns(is_free).take(rows)
        gaps = _FreeRuns((~self._is_used & ~is_free[:, None]).reshape(-1))
        is_free[pages] = False
        fresh = _FreeRuns(is_free.repeat(self.page_tokens))
        tokens = []
        for count in groups:
            in_gaps = min(count, gaps.total)
            tokens += [gaps.take(in_gaps), fresh.take(count - in_gaps)]
        return _joined(tokens), pages

    def _free_pages(self) -> BoolArray:
        is_free: BoolArray = self._is_used.sum(axis=1) == 0  # [pages]
        return is_free

    def divide(self, region: Region, pieces: Sequence[tuple[Hashable, IntArray]]) -> None:
        (whole,) = (content for content in region.contents if content.key is None)
        tokens = [tokens for _, tokens in pieces]
        rest = np.setdiff1d(whole.tokens, _joined(tokens))
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
        """Erase what no other region has, and free its tokens.

        `Region.erase` calls this, after the last reference.
        """
        with self.lock:
            for content in region.contents:
                content.regions -= 1
            gone = [content for content in region.contents if not content.regions]
            for content in gone:
                self._by_key.pop(content.key, None)  # from here on nobody shares it
        tokens = np.sort(_joined([content.tokens for content in gone]))
        if self._erase is not None:
            self._erase(tokens)
        with self.lock:
            self._regions.remove(region)
            self._is_used.reshape(-1)[tokens] = False
            self._has_row &= self._is_used.any(axis=1)

    # ---- tests -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert every invariant; tests call this after each change, while nothing is erased."""
        counted: dict[Content, int] = {}
        for region in self._regions:
            assert region.references > 0
            for content in region.contents:
                counted[content] = counted.get(content, 0) + 1
        assert all(content.regions == count for content, count in counted.items())
        tokens = _joined([content.tokens for content in counted])
        assert len(np.unique(tokens)) == len(tokens), "a token belongs to two contents"
        assert np.array_equal(np.sort(tokens), np.flatnonzero(self._is_used))
        assert self._is_used[self._has_row].all(), "a row of a map is a whole page"
        assert all(content in counted and content.key == key for key, content in self._by_key.items())
        assert self._by_key.keys() == {content.key for content in counted} - {None}


def places(pages: IntArray, unit: int) -> IntArray:
    """The places of these pages of `unit` places each."""
    return (pages[:, None] * unit + np.arange(unit)).reshape(-1)


class _FreeRuns:
    """Runs of free places, which are taken one after the other."""

    def __init__(self, is_free: BoolArray) -> None:
        edges = np.flatnonzero(np.diff(is_free.astype(np.int8), prepend=0, append=0))  # start, end, start, end ...
        starts, ends = edges[::2], edges[1::2]
        self._runs = sorted(zip((ends - starts).tolist(), starts.tolist(), strict=True))  # length and start
        self.total = int((ends - starts).sum())

    @property
    def longest(self) -> int:
        return self._runs[-1][0] if self._runs else 0

    def take(self, count: int) -> IntArray:
        """Places [count] in the shortest run that holds them all; if there is none, in the longest ones."""
        assert count <= self.total
        self.total -= count
        taken = []
        while count:
            length, start = self._runs.pop(min(bisect_left(self._runs, (count, 0)), len(self._runs) - 1))
            here = min(count, length)
            taken.append(np.arange(start, start + here))
            if here < length:
                insort(self._runs, (length - here, start + here))
            count -= here
        return _joined(taken)


def _joined(parts: Sequence[IntArray]) -> IntArray:
    return np.concatenate([np.empty(0, np.int64), *parts])
