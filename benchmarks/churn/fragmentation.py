"""What holes in the memory pool cost: Zipf traffic over bundles of many sizes, on the pool's own first fit.

    python -m benchmarks.churn.fragmentation

A name that is not resident is loaded, and the least recently used ones leave until it fits; those of the last requests
are in use and stay. The same traffic on a pool that could close its holes for nothing, and with the smallest hole that
is long enough (best fit), is what first fit is compared with.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np

from benchmarks.record import keep, parser_of
from inducekv_vllm.attention.ranges import Ranges, Region
from inducekv_vllm.errors import CapacityError

NAMES: Final = 10_000
ROOM: Final = 200  # bundles of the mean size
IN_USE: Final = 32  # requests at a time
SEED: Final = 0


class Pool(Protocol):
    """Room for bundles, by name."""

    used: int

    def load(self, name: int, size: int) -> bool:
        """Whether it fits."""
        ...

    def unload(self, name: int) -> None: ...


class BestFit(Ranges):
    """The smallest hole that is long enough."""

    def allocate(self, length: int) -> Region:
        gaps = self._gaps()
        long_enough = [(len(gap), number) for number, gap in enumerate(gaps) if len(gap) >= length]
        if not long_enough:
            raise CapacityError(f"no {length} adjacent places are free")
        _, number = min(long_enough)
        region = Region(self, gaps[number][:length])
        self._regions.insert(number, region)
        return region


class WithHoles:
    """A pool in which nothing moves."""

    def __init__(self, ranges: Ranges) -> None:
        self.used = 0
        self._ranges, self._regions = ranges, dict[int, Region]()

    def load(self, name: int, size: int) -> bool:
        try:
            self._regions[name] = self._ranges.allocate(size)
        except CapacityError:
            return False
        self.used += size
        return True

    def unload(self, name: int) -> None:
        region = self._regions.pop(name)
        self.used -= len(region.place)
        region.release()


class WithoutHoles:
    """A pool that closes its holes for nothing."""

    def __init__(self, capacity: int) -> None:
        self.used, self._capacity = 0, capacity
        self._sizes: dict[int, int] = {}

    def load(self, name: int, size: int) -> bool:
        if self.used + size > self._capacity:
            return False
        self._sizes[name] = size
        self.used += size
        return True

    def unload(self, name: int) -> None:
        self.used -= self._sizes.pop(name)


POOLS: Final[dict[str, Callable[[int], Pool]]] = {
    "first_fit": lambda capacity: WithHoles(Ranges(capacity, lambda place: None)),
    "best_fit": lambda capacity: WithHoles(BestFit(capacity, lambda place: None)),
    "without_holes": WithoutHoles,
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=60_000, help="a quarter of them fills the pool")
    args = parser.parse_args()
    rng = np.random.default_rng(SEED)
    share = 1 / np.arange(1, NAMES + 1)  # Zipf, exponent 1
    asked = rng.permutation(NAMES)[rng.choice(NAMES, args.requests, p=share / share.sum())]
    drawn = {
        "forty_fold": np.exp(rng.uniform(np.log(5), np.log(200), NAMES)).round().astype(int),
        "small_and_large": np.where(rng.random(NAMES) < 0.8, rng.integers(5, 20, NAMES), rng.integers(100, 200, NAMES)),
        "three_sizes": rng.choice([16, 48, 96], NAMES),
    }
    found = {
        kind: {name: served(make(int(sizes.mean() * ROOM)), sizes, asked) for name, make in POOLS.items()}
        for kind, sizes in drawn.items()
    }
    known = {"benchmark": "churn-fragmentation", "requests": args.requests, "names": NAMES, "room": ROOM}
    keep(known | {"sizes": found}, args.output)
    return 0


def served(pool: Pool, sizes: np.ndarray, asked: np.ndarray) -> dict[str, float]:
    """Serve the requests, and count behind the first quarter of them: of all, how many found their name resident; the
    share of the places that is used; and how many names leave for a load.

    Args:
        sizes: places of each name [N].
        asked: the name of each request, in their order.
    """
    resident, in_use = OrderedDict[int, None](), deque[int](maxlen=IN_USE)
    used, left = list[int](), list[int]()  # places at each request, and how many leave for a load
    capacity = int(sizes.mean() * ROOM)
    for number, name in enumerate(map(int, asked)):
        is_counted = number >= len(asked) // 4
        in_use.append(name)
        if is_counted:
            used.append(pool.used)
        if name in resident:
            resident.move_to_end(name)
            continue
        gone = 0
        while not pool.load(name, int(sizes[name])):
            oldest = next(each for each in resident if each not in in_use)
            del resident[oldest]
            pool.unload(oldest)
            gone += 1
        resident[name] = None
        if is_counted:
            left.append(gone)
    return {
        "hit_rate": round(1 - len(left) / len(used), 4),
        "used": round(float(np.mean(used)) / capacity, 3),
        "leave_for_a_load_p99": float(np.percentile(left, 99)),
    }


if __name__ == "__main__":
    sys.exit(main())
