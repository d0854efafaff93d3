"""Requests share slots and give them up; an unloaded bundle stays for its last request."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from inducekv_vllm.attention.pool import PoolShape
from inducekv_vllm.attention.slots import RequestMemory, Slots
from inducekv_vllm.errors import CapacityError
from inducekv_vllm.retrieval.entry_terms import Retrieval, entry_terms
from tests.unit.inducekv_vllm.attention.pools import fitting_bundle, poisoned_pool, store

SHAPE = PoolShape(entries=40, num_layers=1, num_kv_heads=1, heads_per_kv_head=1, head_size=8)
TERMS = entry_terms(Retrieval(np.arange(2), np.full(2, 0.5, np.float32)), "uniform", payload_tokens=1, num_entries=2)


def test_invariants_hold_under_random_use() -> None:
    """Equal contents share a slot, which is filled once; others have others, and no more than there are."""
    bundle = store(poisoned_pool(SHAPE), fitting_bundle(SHAPE, 2, 1))
    rng, filled = random.Random(0), list[RequestMemory]()
    slots, running, held = Slots(5, filled.append), list[str](), dict[str, RequestMemory]()
    for _ in range(2000):
        if running and rng.random() < 0.5:
            content = running.pop(rng.randrange(len(running)))
            slots.release(content)
            if content not in running:
                del held[content]
        else:
            content, so_far = str(rng.randrange(8)), len(filled)
            try:
                memory = slots.acquire(content, bundle, TERMS)
            except CapacityError:
                assert len(held) == 5
                assert content not in held
                assert len(filled) == so_far
                continue
            running.append(content)
            assert (memory is held[content]) if content in held else (filled[so_far:] == [memory])
            held[content] = memory
        assert slots.used == len(held) == len(Counter(running))
        numbers = [memory.slot for memory in held.values()]
        assert len(set(numbers)) == len(numbers)
        assert set(numbers) <= set(range(1, 6))


def test_without_slots() -> None:
    with pytest.raises(ValueError, match="at least 1, found 0"):
        Slots(0, lambda memory: None)
