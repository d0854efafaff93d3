from __future__ import annotations

import random

import pytest
import torch

from inducekv_vllm.attention.pages import LayerPages, RequestMemory, ResidentBundle
from inducekv_vllm.attention.request_table import MemoryOfRequests
from inducekv_vllm.attention.slots import NO_MEMORY, SlotTable
from inducekv_vllm.errors import CapacityError


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


def _memory() -> RequestMemory:
    layer = LayerPages(torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), gate=1.0, bias=0.0)
    bundle = ResidentBundle("digest", num_entries=2, payload_tokens=1, weighting="prior", layers=(layer,))
    return RequestMemory(bundle, None, None, None, None, float("-inf"))


def test_rows_find_their_memory_by_their_first_block() -> None:
    requests = MemoryOfRequests(num_blocks=8, capacity=3, device=torch.device("cpu"))
    first, second = _memory(), _memory()
    requests.start("a", 3, "x", first)
    requests.start("b", 5, None, None)
    requests.start("c", 7, "y", second)
    assert requests.of_rows(torch.tensor([7, 5, 3])) == [second, None, first]
    assert requests.of_rows(torch.tensor([5])) is None


def test_a_block_that_changes_hands_leaves_no_memory_behind() -> None:
    requests = MemoryOfRequests(num_blocks=8, capacity=3, device=torch.device("cpu"))
    memory = _memory()
    requests.start("a", 3, "x", memory)
    requests.pause(["a"])  # preempted: its block goes to a request without memory
    requests.start("b", 3, None, None)
    assert requests.of_rows(torch.tensor([3])) is None
    requests.place("a", 4)  # resumed elsewhere
    assert requests.of_rows(torch.tensor([3, 4])) == [None, memory]
    requests.finish(["a", "b"])
    assert requests.slots.used == 0
    assert requests.of_rows(torch.tensor([4])) is None
