"""Requests share slots and give them up; an unloaded bundle stays for its last request."""

from __future__ import annotations

import random

import numpy as np
import pytest

from inducekv_vllm.attention.pool import PoolShape
from inducekv_vllm.attention.request_table import MemoryOfRequests
from inducekv_vllm.attention.resident_bundle import RequestMemory
from inducekv_vllm.attention.slots import SlotTable
from inducekv_vllm.errors import CapacityError
from inducekv_vllm.retrieval.entry_terms import Retrieval, entry_terms
from tests.unit.inducekv_vllm.attention.pools import fitting_bundle, poisoned_pool, store

SHAPE = PoolShape(entries=40, num_layers=1, num_kv_heads=1, heads_per_kv_head=1, head_size=8)
TERMS = entry_terms(Retrieval(np.arange(2), np.full(2, 0.5, np.float32)), "uniform", payload_tokens=1, num_entries=2)


def test_invariants_hold_under_random_use() -> None:
    rng = random.Random(0)
    table, running = SlotTable(5), set[str]()
    for step in range(2000):
        if running and rng.random() < 0.5:
            request = rng.choice(sorted(running))
            running.remove(request)
            table.release(request)
        else:
            try:
                table.acquire(f"r{step}", rng.randrange(8))
                running.add(f"r{step}")
            except CapacityError:
                assert table.used == 5
        table.check()


def test_slots_have_the_memory_of_running_requests() -> None:
    """Requests of equal content share one, preempted ones have none, and an unloaded bundle stays for its last one."""
    pool, filled = poisoned_pool(SHAPE), list[RequestMemory]()
    requests = MemoryOfRequests(2, filled.append)
    first, other = store(pool, fitting_bundle(SHAPE, 2, 1)), store(pool, fitting_bundle(SHAPE, 2, 1, map_rank=1))
    free = pool.num_free_tokens
    for request, content, bundle in (("a", "x", first), ("b", "x", first), ("c", "y", other)):
        requests.start(request, content, bundle, TERMS, start=7)
    assert [memory.bundle for memory in filled] == [first, other]
    memories = {request: requests.of_request(request) for request in "abcd"}
    assert memories == {"a": filled[0], "b": filled[0], "c": filled[1], "d": None}
    assert requests.of_requests([*"cbd"], "merged") == [None, filled[0], None]
    assert requests.of_requests([*"cbd"], "decoupled") == [filled[1], None, None]
    assert requests.of_requests([*"cd"], "merged") is None
    assert [requests.first_active(request) for request in "ad"] == [7, 0]

    requests.preempt(["b", "c"])
    first.region.release()  # the bundle is unloaded
    requests.finish(["a"])
    assert requests.of_requests([*"abc"], "merged") is None
    requests.start("e", "z", other, TERMS, start=0)
    requests.resume("b")
    requests.resume("d")  # a request without memory
    with pytest.raises(CapacityError, match="all 2 memory slots"):
        requests.resume("c")
    memory = requests.of_request("b")
    assert memory is not None
    assert memory.bundle is first
    assert pool.num_free_tokens == free
    requests.finish("bced")
    assert requests.slots.used == 0
    assert "b" not in requests
    assert pool.num_free_tokens == free + 2
