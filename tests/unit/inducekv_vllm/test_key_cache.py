"""Query keys by prompt: an LRU, shared computations, and what cancellation does to them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from inducekv_vllm.engine.key_cache import KeyCache, KeyLookup
from inducekv_vllm.engine.memory_index import QueryFeatures

pytestmark = pytest.mark.anyio


class Computation:
    """Counts its runs, waits until it is released, and notes when it is cancelled."""

    def __init__(self, value: float = 1.0, error: Exception | None = None) -> None:
        self.value, self.error = value, error
        self.runs = self.cancelled = 0
        self.release = asyncio.Event()

    async def __call__(self) -> QueryFeatures:
        self.runs += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return QueryFeatures(np.full(2, self.value, dtype=np.float32))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def begin(count: int, cache: KeyCache, compute: Computation) -> list[asyncio.Task[KeyLookup]]:
    """Callers that all wait for the key of one prompt."""
    callers = [asyncio.create_task(cache.get(b"p", compute)) for _ in range(count)]
    await settle()
    return callers


async def test_when_who_computes_leaves_one_of_the_others_computes() -> None:
    cache, compute = KeyCache(4), Computation()
    first, second, third = await begin(3, cache, compute)
    first.cancel()
    await settle()
    assert (compute.runs, compute.cancelled) == (2, 1)
    compute.release.set()
    lookups = await asyncio.gather(second, third)
    assert sorted(lookup.source for lookup in lookups) == ["computed", "shared"]
    assert first.cancelled()


async def test_an_error_reaches_all_and_is_not_remembered() -> None:
    cache, compute = KeyCache(4), Computation(error=ValueError("too long"))
    callers = await begin(2, cache, compute)
    compute.release.set()
    for caller in callers:
        with pytest.raises(ValueError, match="too long"):
            await caller
    compute.error = None
    assert (await cache.get(b"p", compute)).source == "computed"


async def test_the_least_recently_used_key_goes_first() -> None:
    cache, compute = KeyCache(2), Computation()
    compute.release.set()
    for prompt in (b"a", b"b", b"a", b"c"):  # b is the oldest when c comes
        await cache.get(prompt, compute)
    assert len(cache) == 2
    assert (await cache.get(b"a", compute)).source == "cached"
    assert (await cache.get(b"b", compute)).source == "computed"
