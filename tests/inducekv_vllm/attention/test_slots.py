from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest

from inducekv_vllm.attention.pool import PoolShape
from inducekv_vllm.attention.request_table import MemoryOfRequests
from inducekv_vllm.attention.resident_bundle import RequestMemory, ResidentBundle
from inducekv_vllm.attention.slots import NO_MEMORY, SlotTable
from inducekv_vllm.errors import CapacityError
from inducekv_vllm.retrieval.page_terms import Form, Retrieval, page_terms
from tests.inducekv_vllm.attention.pools import fitting_bundle, poisoned_pool, store


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


def test_requests_of_equal_content_share_a_slot_until_the_last_one_ends() -> None:
    table = SlotTable(2)
    first, is_new = table.acquire("a", "x")
    assert is_new
    assert first != NO_MEMORY
    assert table.acquire("b", "x") == (first, False)
    assert table.release("a") is None
    assert table.slot_of("a") == NO_MEMORY
    assert table.slot_of("b") == first
    assert table.release("b") == first
    assert table.release("b") is None
    assert table.used == 0


SHAPE = PoolShape(entries=40, num_layers=1, num_kv_heads=1, heads_per_kv_head=1, head_size=8)
TERMS = page_terms(
    Retrieval(np.arange(2), np.full(2, 0.5, np.float32)), "uniform", payload_tokens=1, num_entries=2, remainder=False
)


@dataclass(eq=False)
class _World:
    capacity: int

    def __post_init__(self) -> None:
        self.pool = poisoned_pool(SHAPE)
        self.filled: list[RequestMemory] = []
        self.requests = MemoryOfRequests(self.capacity, self.filled.append)

    def bundle(self, form: Form = "merged") -> ResidentBundle:
        weighting = "prior" if form == "merged" else "uniform"
        activations = {} if form == "merged" else {"t": "prompt"}
        bundle = fitting_bundle(SHAPE, 2, 1, weighting=weighting, form=form, activations=activations)
        return store(self.pool, bundle)

    def start(self, request: str, content: str, bundle: ResidentBundle, start: int = 0) -> None:
        self.requests.start(request, content, bundle, TERMS, start)

    def found(self, requests: str, form: Form) -> list[ResidentBundle | None] | None:
        memories = self.requests.of_requests(list(requests), form)
        return memories and [memory and memory.bundle for memory in memories]


def test_requests_find_their_memory_by_form() -> None:
    world = _World(capacity=3)
    first, second, decoupled = world.bundle(), world.bundle(), world.bundle("decoupled")
    world.start("a", "x", first)
    world.start("c", "y", second)
    world.start("d", "z", decoupled, 7)
    assert [memory.bundle for memory in world.filled] == [first, second, decoupled]
    assert world.found("cbad", "merged") == [second, None, first, None]
    assert world.found("cbad", "decoupled") == [None, None, None, decoupled]
    assert world.found("bd", "merged") is None
    assert [world.requests.first_active(request) for request in "abd"] == [0, 0, 7]


def test_a_preempted_request_gives_its_slot_back_until_it_resumes() -> None:
    world = _World(capacity=1)
    first, other = world.bundle(), world.bundle()
    world.start("a", "x", first)
    world.requests.pause(["a"])
    assert world.found("a", "merged") is None
    world.start("b", "y", other)
    with pytest.raises(CapacityError, match="all 1 memory slots"):
        world.requests.resume("a")
    world.requests.finish(["b"])
    world.requests.resume("a")
    world.requests.resume("p")  # a request without memory
    assert world.found("abp", "merged") == [first, None, None]
    world.requests.finish(["a", "b"])
    assert world.requests.slots.used == 0
    assert world.found("a", "merged") is None


def test_an_unloaded_bundle_is_free_when_its_last_request_has_ended() -> None:
    world = _World(capacity=2)
    bundle = world.bundle()
    free = world.pool.num_free_tokens
    world.start("a", "x", bundle)
    world.start("b", "x", bundle)
    world.requests.pause(["b"])
    assert "b" in world.requests
    bundle.region.release()  # the bundle is unloaded
    world.requests.finish(["a"])
    world.requests.resume("b")
    assert world.found("b", "merged") == [bundle]
    assert world.pool.num_free_tokens == free
    world.requests.finish(["b", "never"])
    assert "b" not in world.requests
    assert world.pool.num_free_tokens > free
