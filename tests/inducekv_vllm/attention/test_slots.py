from __future__ import annotations

import random

import pytest
import torch

from inducekv_vllm.attention.pages import LayerPages, RequestMemory, ResidentBundle
from inducekv_vllm.attention.request_table import MemoryOfRequests
from inducekv_vllm.attention.slots import NO_MEMORY, SlotTable
from inducekv_vllm.errors import CapacityError
from inducekv_vllm.page_terms import Form


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


def test_a_full_table_refuses_and_stays_as_it_is() -> None:
    table = SlotTable(1)
    slot, _ = table.acquire("a", "x")
    with pytest.raises(CapacityError, match="all 1 memory slots"):
        table.acquire("b", "y")
    table.check()
    assert table.acquire("c", "x") == (slot, False)
    assert table.slot_of("b") == NO_MEMORY


def test_a_table_needs_a_slot() -> None:
    with pytest.raises(ValueError, match="at least 1, found 0"):
        SlotTable(0)


def test_invariants_hold_under_random_use() -> None:
    rng = random.Random(0)
    table, running = SlotTable(5), set[str]()
    for step in range(2000):
        if running and rng.random() < 0.5:
            request = rng.choice(sorted(running))
            running.remove(request)
            table.release(request)
        else:
            request = f"r{step}"
            try:
                table.acquire(request, rng.randrange(8))
                running.add(request)
            except CapacityError:
                assert table.used == 5
        table.check()


def _memory(form: Form = "merged") -> RequestMemory:
    layer = LayerPages(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), gate=1.0, bias=0.0)
    bundle = ResidentBundle("digest", num_entries=2, payload_tokens=1, weighting="prior", form=form, layers=(layer,))
    return RequestMemory(bundle, None, None, None, None, float("-inf"))


def test_requests_find_their_memory_by_form() -> None:
    requests = MemoryOfRequests(capacity=3)
    first, second, decoupled = _memory(), _memory(), _memory("decoupled")
    requests.start("a", "x", first, 0)
    requests.start("c", "y", second, 0)
    requests.start("d", "z", decoupled, 7)
    assert requests.of_requests(["c", "b", "a", "d"], "merged") == [second, None, first, None]
    assert requests.of_requests(["c", "b", "a", "d"], "decoupled") == [None, None, None, decoupled]
    assert requests.of_requests(["b", "d"], "merged") is None
    assert [requests.first_active(request) for request in "abd"] == [0, 0, 7]


def test_a_preempted_request_gives_its_slot_back_until_it_resumes() -> None:
    requests = MemoryOfRequests(capacity=1)
    memory, other = _memory(), _memory()
    requests.start("a", "x", memory, 0)
    requests.pause(["a"])
    assert requests.of_requests(["a"], "merged") is None
    requests.start("b", "y", other, 0)
    with pytest.raises(CapacityError, match="all 1 memory slots"):
        requests.resume("a")
    requests.finish(["b"])
    requests.resume("a")
    requests.resume("plain")  # a request without memory
    assert requests.of_requests(["a", "b", "plain"], "merged") == [memory, None, None]
    requests.finish(["a", "b"])
    assert requests.slots.used == 0
    assert requests.of_requests(["a"], "merged") is None
