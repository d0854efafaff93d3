"""Requests share slots and give them up; an unloaded bundle stays for its last request."""

import gc
import random
from collections import Counter
from weakref import ref

import numpy as np

from inducekv_vllm.attention.pool import PoolShape
from inducekv_vllm.attention.resident_bundle import ResidentBundle
from inducekv_vllm.attention.slots import RequestMemory, Slots
from inducekv_vllm.errors import CapacityError
from inducekv_vllm.retrieval.entry_terms import Retrieval, entry_terms
from tests.unit.inducekv_vllm.attention.pools import fitting_bundle, poisoned_pool, store

SHAPE = PoolShape(entries=40, num_layers=1, num_kv_heads=1, heads_per_kv_head=1, head_size=8, value_size=8)
TERMS = entry_terms(Retrieval(np.arange(2), np.full(2, 0.5, np.float32)), "uniform", payload_tokens=1, num_entries=2)


def test_invariants_hold_under_random_use() -> None:
    """Equal contents share a slot; others have others, and no more than there are. A slot is filled with what it lacks.

    Of a content that nobody holds, the bundle may be unloaded and loaded again: it may lie elsewhere then.
    """
    pool = poisoned_pool(SHAPE)
    bundles = [store(pool, fitting_bundle(SHAPE, 2, 1)) for _ in range(2)]
    rng, asked, filled = random.Random(0), ("", bundles[0]), 0
    has: dict[int, tuple[str, ResidentBundle]] = {}  # by slot
    running, held = list[str](), dict[str, RequestMemory]()

    def fill(memory: RequestMemory) -> None:
        nonlocal filled
        filled += 1
        has[memory.slot] = asked

    slots = Slots(5, fill)
    for _ in range(3000):
        if running and rng.random() < 0.5:
            content = running.pop(rng.randrange(len(running)))
            slots.release(content)
            if content not in running:
                del held[content]
        else:
            content, before = str(rng.randrange(8)), filled
            bundle = held[content].bundle if content in held else rng.choice(bundles)
            asked, was_there = (content, bundle), (content, bundle) in has.values()
            try:
                memory = slots.acquire(content, bundle, TERMS)
            except CapacityError:
                assert len(held) == 5
                assert content not in held
                assert filled == before
                continue
            running.append(content)
            assert memory is held.setdefault(content, memory)
            assert memory.bundle is bundle
            assert has[memory.slot] == asked
            assert filled - before == (not was_there)
        assert slots.used == len(held) == len(Counter(running))
        numbers = [memory.slot for memory in held.values()]
        assert len(set(numbers)) == len(numbers)
        assert set(numbers) <= set(range(1, 6))
    assert filled < 1000


def test_the_longest_idle_slot_is_written_anew_and_no_unloaded_bundle_is_kept() -> None:
    filled = list[int]()
    slots = Slots(2, lambda memory: filled.append(memory.slot))
    bundle = store(poisoned_pool(SHAPE), fitting_bundle(SHAPE, 2, 1))
    for content in ("first", "second", "first", "third"):  # one after the other
        slots.acquire(content, bundle, TERMS)
        slots.release(content)
    assert filled == [1, 2, 2]  # "third" has the slot of "second"
    kept = ref(bundle)
    del bundle
    gc.collect()
    assert kept() is None
