"""Contiguous ranges of a pool of fixed size, by first fit. They never move. Any thread may use them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from ..errors import CapacityError


class Region:
    """A range of a pool, with references. After the last one it is erased, and then it is free."""

    def __init__(self, ranges: Ranges, place: range) -> None:
        """It has one reference."""
        self.place = place
        self.references = 1
        self._ranges = ranges

    @property
    def is_free(self) -> bool:
        """Whether it has been erased and given back."""
        return not self._ranges.holds(self)

    def retain(self) -> None:
        with self._ranges.lock:
            assert self.references > 0, "the region is free"
            self.references += 1

    def release(self) -> None:
        """Drop a reference. The last one erases the region, which takes the time of writing it."""
        if self.drop():
            self.erase()

    def drop(self) -> bool:
        """Drop a reference, and return whether it was the last one: then somebody must call `erase`, once."""
        with self._ranges.lock:
            assert self.references > 0, "the region is free"
            self.references -= 1
            return not self.references

    def erase(self) -> None:
        """Erase the region, and give it back."""
        assert not self.references, "the region is in use"
        self._ranges.take_back(self)


class Ranges:
    """Places 0..capacity-1 and the regions that lie in them."""

    def __init__(self, capacity: int, erase: Callable[[range], None]) -> None:
        """`erase` overwrites places before they are free again."""
        self.lock = threading.Lock()
        self.capacity = capacity
        self._regions: list[Region] = []  # in the order of their places
        self._erase = erase

    @property
    def num_free(self) -> int:
        with self.lock:
            return sum(map(len, self._gaps()))

    @property
    def largest_free(self) -> int:
        """The places of the largest range that is free."""
        with self.lock:
            return max(map(len, self._gaps()))

    def allocate(self, length: int) -> Region:
        """Take the first free range of this length. Raises CapacityError if there is none; nothing changes."""
        assert length >= 0  # a bundle of task adapters alone has no entries
        with self.lock:
            for index, gap in enumerate(self._gaps()):
                if len(gap) >= length:
                    region = Region(self, gap[:length])
                    self._regions.insert(index, region)
                    return region
        raise CapacityError(f"{length} adjacent places are needed, {self.largest_free} are free")

    def holds(self, region: Region) -> bool:
        with self.lock:
            return region in self._regions

    def take_back(self, region: Region) -> None:
        """Erase a region and free its places; `Region.erase` calls this."""
        self._erase(region.place)
        with self.lock:
            self._regions.remove(region)

    def check(self) -> None:
        """Assert every invariant; tests call this after each change, while nothing is erased."""
        places = [place for region in self._regions for place in region.place]
        assert places == sorted(set(places)), "regions overlap, or are not in order"
        assert set(places) <= set(range(self.capacity))
        assert all(region.references > 0 for region in self._regions)
        assert self.num_free == self.capacity - len(places)

    def _gaps(self) -> list[range]:
        """The free range before each region and behind the last one; some are empty."""
        starts = [region.place.start for region in self._regions]
        stops = [region.place.stop for region in self._regions]
        return list(itertools.starmap(range, zip([0, *stops], [*starts, self.capacity], strict=True)))
