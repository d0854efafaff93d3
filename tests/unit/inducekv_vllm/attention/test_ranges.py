"""Contiguous ranges by first fit, against a list of places; and how large a pool must be to never refuse a version."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inducekv_vllm.attention.ranges import Ranges, Region
from inducekv_vllm.errors import CapacityError

AS_DRAWN = settings(deadline=None, derandomize=True)


def first_fit(is_free: list[bool], length: int) -> int | None:
    """The first place that as many free ones begin at."""
    starts = range(len(is_free) - length + 1)
    return next((start for start in starts if all(is_free[start : start + length])), None)


@AS_DRAWN
@given(st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["allocate", "retain", "release"])), max_size=60))
def test_random_use(steps: list[tuple[int, str]]) -> None:
    is_free, erased, held = [True] * 12, list[range](), list[Region]()
    ranges = Ranges(12, erased.append)
    for number, step in steps:
        if step == "allocate":
            start = first_fit(is_free, number)
            if start is None:
                with pytest.raises(CapacityError):
                    ranges.allocate(number)
                continue
            held.append(ranges.allocate(number))
            assert held[-1].place == range(start, start + number)
            is_free[start : start + number] = [False] * number
        elif held and step == "retain":
            held.append(held[number % len(held)])
            held[-1].retain()
        elif held:
            region = held.pop(number % len(held))
            region.release()
            assert region.is_free == (region not in held) == (region.place in erased)
            if region.is_free:
                erased.remove(region.place)
                is_free[region.place.start : region.place.stop] = [True] * len(region.place)
        ranges.check()
        assert ranges.num_free == sum(is_free)


def test_a_range_is_free_only_when_it_is_erased() -> None:
    free_meanwhile: list[int] = []
    ranges = Ranges(3, lambda place: free_meanwhile.append(ranges.num_free))
    region = ranges.allocate(3)
    assert region.drop()
    assert not region.is_free
    region.erase()
    assert region.is_free
    assert free_meanwhile == [0]
    assert ranges.allocate(3).place == range(3)


def test_what_has_been_freed_cannot_be_used() -> None:
    region = Ranges(3, lambda _: None).allocate(3)
    region.release()
    for use in (region.retain, region.release):
        with pytest.raises(AssertionError, match="the region is free"):
            use()


@AS_DRAWN
@given(st.integers(1, 4), st.booleans(), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=60))
def test_a_pool_of_the_documented_size_never_refuses_a_version(
    names: int, of_one_size: bool, loads: list[tuple[int, int]]
) -> None:
    """docs/serving.md: of n names, n + 1 times the size of all versions, or 2 n + 1 times that of the largest one."""
    ranges = Ranges((names + 1 if of_one_size else 2 * names + 1) * 9, lambda _: None)
    loaded: dict[int, Region] = {}
    for name, size in loads:
        version = ranges.allocate(9 if of_one_size else size)
        if (before := loaded.pop(name % names, None)) is not None:
            before.release()
        loaded[name % names] = version
        ranges.check()
