"""The resident pool and its pages: what lies where, what does not fit, and what moves (nothing)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor

from inducekv_vllm.attention.page_allocator import PageAllocator, Region
from inducekv_vllm.attention.pages import ResidentBundle
from inducekv_vllm.attention.pool import PagePool, PoolShape
from inducekv_vllm.attention.term_tables import TermTables
from inducekv_vllm.bundle import Bundle, EntryRecord
from inducekv_vllm.errors import CapacityError, UnsupportedModel
from inducekv_vllm.retrieval.page_terms import Retrieval, page_terms
from tests.inducekv_vllm.attention.pools import CPU, fitting_bundle, poisoned_pool, random_memory, store
from tests.inducekv_vllm.bundles import random_gate

SHAPE = PoolShape(entries=20, num_layers=3, num_kv_heads=2, heads_per_kv_head=3, head_size=8)  # 54 pages of 3 tokens


def take(allocator: PageAllocator, count: int) -> tuple[Region, list[int]]:
    region = allocator.region()
    try:
        return region, region.allocate(count)[0].tolist()
    except CapacityError:
        region.release()
        raise


class TestPageAllocator:
    def test_the_smallest_run_that_fits(self) -> None:
        allocator = PageAllocator(10)
        regions = [take(allocator, count)[0] for count in (2, 1, 3, 1)]  # 0-1, 2, 3-5, 6; 7-9 are free
        regions[0].release()
        allocator.check()
        assert take(allocator, 2)[1] == [0, 1]
        assert take(allocator, 2)[1] == [7, 8]

    def test_without_one_the_longest_runs(self) -> None:
        allocator = PageAllocator(7)
        regions = [take(allocator, 1)[0] for _ in range(7)]
        for page in (0, 2, 3, 6):
            regions[page].release()
        _, pages = take(allocator, 3)
        allocator.check()
        assert pages == [2, 3, 0]

    def test_a_full_pool_still_has_room_for_no_page(self) -> None:
        allocator = PageAllocator(2)
        take(allocator, 2)
        assert take(allocator, 0)[1] == []
        allocator.check()

    def test_what_does_not_fit_changes_nothing(self) -> None:
        allocator = PageAllocator(3)
        take(allocator, 2)
        with pytest.raises(CapacityError, match=r"2 tokens are needed, .* 1 of 3 are free"):
            take(allocator, 2)
        allocator.check()
        assert allocator.num_free == 1

    def test_tokens_are_free_after_the_last_release(self) -> None:
        allocator = PageAllocator(3)
        region, _ = take(allocator, 3)
        region.retain()
        region.release()
        assert allocator.num_free == 0
        region.release()
        assert allocator.num_free == 3
        with pytest.raises(AssertionError, match="the region is free"):
            region.release()

    def test_a_pool_needs_a_page(self) -> None:
        with pytest.raises(ValueError, match="at least 1 page, found 0"):
            PageAllocator(0)

    def test_groups_lie_together_or_each_in_one_run(self) -> None:
        allocator = PageAllocator(5, page_tokens=4)
        regions, groups = [allocator.region() for _ in range(4)], ([3], [3, 3], [2], [1])
        tokens = [region.allocate(*sizes)[0].tolist() for region, sizes in zip(regions, groups, strict=True)]
        assert tokens == [[0, 1, 2], [*range(3, 9)], [9, 10], [11]]
        regions[0].release()
        regions[2].release()  # 0-2, 9-10 and 12-19 are free
        assert allocator.region().allocate(6, 3)[0].tolist() == [*range(12, 18), 0, 1, 2]
        allocator.check()

    def test_rows_of_maps_take_whole_pages(self) -> None:
        allocator = PageAllocator(5, page_tokens=4)
        first, second = allocator.region(), allocator.region()
        tokens, pages = first.allocate(5, rows=2)
        assert (tokens.tolist(), pages.tolist()) == ([*range(5)], [2, 3])
        with pytest.raises(CapacityError, match=r"8 tokens are needed, 1 times 4 .*; 7 of 20 are free, with 1 pages"):
            second.allocate(4, rows=1)
        assert [places.tolist() for places in second.allocate(3, rows=1)] == [[5, 6, 7], [4]]
        allocator.check()
        assert (allocator.num_free, allocator.num_free_pages) == (0, 0)
        first.release()
        assert (allocator.num_free, allocator.num_free_pages) == (13, 3)

    def test_tokens_touch_no_more_pages_than_without_sharing(self) -> None:
        """Of each version one token stays for good: gaps of three, and every version brings four."""
        allocator = PageAllocator(40, page_tokens=4)
        kept = list[int]()
        previous: Region | None = None
        for version in range(20):
            region = allocator.region()
            region.share(kept)
            tokens, _ = region.allocate(4, shared=len(kept))
            keys = range(4 * version, 4 * version + 4)
            region.divide([(key, token[None]) for key, token in zip(keys, tokens, strict=True)])
            assert version > 3 or (np.diff(tokens) == 1).all(), "adjacent while that takes no more pages"
            unshared = sum(-(-(version + 4 - older) // 4) for older in range(2))
            assert 40 - allocator.num_free_pages <= unshared
            if previous is not None:
                previous.release()
            previous = region
            kept.append(4 * version)
            allocator.check()

    def test_invariants_hold_under_random_use(self) -> None:
        rng = random.Random(0)
        allocator, held = PageAllocator(12), list[Region]()
        for _ in range(1000):
            if held and rng.random() < 0.5:
                held.pop(rng.randrange(len(held))).release()
            elif held and rng.random() < 0.2:
                held.append(rng.choice(held))
                held[-1].retain()
            else:
                count, free = rng.randrange(6), allocator.num_free
                try:
                    region, pages = take(allocator, count)
                    held.append(region)
                    assert len(pages) == count
                except CapacityError:
                    assert count > free
            allocator.check()


def check_contents(resident: ResidentBundle, bundle: Bundle) -> None:
    """Every token and every row of a map lies where the resident bundle says."""
    for layer, pages in enumerate(resident.layers):
        kept = {pages.keys: bundle.payload_keys, pages.values: bundle.payload_values}
        for tensor, payload in kept.items():
            expected = payload[layer].transpose(0, 1).flatten(1, 2)
            assert torch.equal(tensor[:, torch.from_numpy(resident.tokens.reshape(-1))], expected.to(tensor.dtype))
        if bundle.metadata.form == "decoupled":
            nulls = torch.from_numpy(resident.null_tokens)
            assert not pages.keys[:, nulls].any()
            assert not pages.values[:, nulls].any()
        if bundle.map_in is not None and bundle.map_out is not None:
            assert pages.map_in is not None
            assert pages.map_out is not None
            for tensor, half in ((pages.map_in, bundle.map_in), (pages.map_out, bundle.map_out.transpose(-1, -2))):
                expected = half[layer].transpose(0, 1).flatten(1, 2)
                assert torch.equal(
                    tensor[:, torch.from_numpy(resident.map_rows.reshape(-1))], expected.to(tensor.dtype)
                )


def addresses(pool: PagePool, resident: ResidentBundle) -> list[int]:
    tensors: list[Tensor | None] = [pool.keys, pool.values]
    for pages in resident.layers:
        tensors += [pages.keys, pages.values, pages.map_in, pages.map_out]
    return [tensor.data_ptr() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bundles_come_and_go_and_the_others_stay(dtype: torch.dtype) -> None:
    """In the end a bundle lies in two runs."""
    pool = poisoned_pool(SHAPE, dtype)
    bundles = [fitting_bundle(SHAPE, 4, 5, seed, map_rank=2) for seed in range(4)]  # 7 + 8 pages each
    residents = [store(pool, bundle) for bundle in bundles[:3]]
    kept_addresses = addresses(pool, residents[1])
    with pytest.raises(CapacityError, match="its 4 entries take 45 tokens, 27 of 162 are free"):
        store(pool, bundles[3])
    for gone in (0, 2):
        residents[gone].region.release()
    large = fitting_bundle(SHAPE, 11, 9, seed=9)  # 33 pages of the 39 that are free, 15 and 24
    residents.append(store(pool, large))
    assert addresses(pool, residents[1]) == kept_addresses
    check_contents(residents[1], bundles[1])
    check_contents(residents[3], large)
    assert not (np.diff(residents[3].tokens.reshape(-1)) == 1).all()
    pool.allocator.check()


def test_a_pool_that_holds_nothing_else_holds_the_entries_it_was_made_for() -> None:
    shape = PoolShape(entries=6, num_layers=1, num_kv_heads=1, heads_per_kv_head=4, head_size=8)
    pool = poisoned_pool(shape)
    resident = store(pool, fitting_bundle(shape, 6, 8))
    assert pool.allocator.num_free == 0
    assert resident.nbytes == shape.nbytes(torch.float32) == 6 * 8 * 2 * 8 * 4
    resident.region.release()
    with pytest.raises(CapacityError, match=r"7 entries take 56 tokens, 48 of 48 .* --memory-pool-entries than 6"):
        store(pool, fitting_bundle(shape, 7, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_freed_pages_are_overwritten_and_no_others(dtype: torch.dtype) -> None:
    """Of bundles in adjacent and in scattered pages, when their last reference goes."""
    pool = poisoned_pool(SHAPE, dtype)
    residents = [store(pool, fitting_bundle(SHAPE, 4, 5, seed, map_rank=2)) for seed in range(3)]
    residents[0].region.release()
    residents[2].region.release()
    kept = fitting_bundle(SHAPE, 4, 5, 1, map_rank=2)
    scattered = store(pool, fitting_bundle(SHAPE, 11, 9, seed=9))
    check_contents(residents[1], kept)
    scattered.region.retain()
    scattered.region.release()
    assert pool.keys[:, :, torch.from_numpy(scattered.tokens.reshape(-1))].any()
    assert not scattered.region.is_free
    scattered.region.release()
    assert scattered.region.is_free
    check_contents(residents[1], kept)
    residents[1].region.release()
    assert not pool.keys.any()  # it was full of NaN, and every page has been in use
    assert not pool.values.any()


def test_a_failed_copy_leaves_no_pages_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = poisoned_pool(SHAPE)
    monkeypatch.setattr(PagePool, "_fill", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store(pool, fitting_bundle(SHAPE, 4, 5))
    assert pool.allocator.num_free == pool.allocator.capacity


def test_a_pool_larger_than_the_machine_is_refused() -> None:
    shape = PoolShape(entries=2**27, num_layers=100, num_kv_heads=8, heads_per_kv_head=1, head_size=128)
    with pytest.raises(CapacityError, match=r"--memory-pool-entries 134217728 needs .* MiB \(6553600 bytes an entry\)"):
        PagePool(shape, torch.float32, CPU)


def test_another_geometry_is_refused() -> None:
    other = PoolShape(entries=20, num_layers=4, num_kv_heads=2, heads_per_kv_head=3, head_size=8)
    with pytest.raises(UnsupportedModel, match=r"3 layers of 2 KV heads of size 8 .* 4 layers of 2 KV heads of size 8"):
        store(poisoned_pool(SHAPE), fitting_bundle(other, 2, 2))


class TestTermTables:
    def test_a_slot_holds_the_terms_of_each_token_in_the_order_of_the_memory(self) -> None:
        pool, tables = poisoned_pool(SHAPE), TermTables.allocate(3, SHAPE, CPU)
        bundle = fitting_bundle(SHAPE, 4, 5, map_rank=2)
        resident = store(pool, bundle)
        weights = np.array([0.5, 0.3, 0.2], dtype=np.float32)
        terms = page_terms(
            Retrieval(np.array([3, 0, 1]), weights), "prior", payload_tokens=5, num_entries=4, remainder=False
        )
        memory = tables.write(2, resident, terms)
        order = np.array([0, 1, 3])
        assert (int(tables.length[2]), int(tables.map_length[2]), int(tables.decoupled[2])) == (15, 6, 1)
        assert tables.token_index[2, :15].tolist() == resident.tokens[order].reshape(-1).tolist()
        assert tables.map_index[2, :6].tolist() == resident.map_rows[order].reshape(-1).tolist()
        assert torch.equal(tables.log_weight[2, :15], torch.tensor([0.3, 0.2, 0.5]).log().repeat_interleave(5))
        torch.testing.assert_close(tables.map_weight[2, :6], torch.tensor([0.3, 0.2, 0.5]).repeat_interleave(2))
        assert torch.equal(tables.gate[:, 2], bundle.value_gates)
        assert torch.equal(tables.bias[:, 2], bundle.layer_bias)
        assert (tables.key_scale[2, :15] == 1).all()
        assert memory.key_scale is None
        assert memory.log_weight is not None
        assert memory.log_weight.data_ptr() == tables.log_weight[2].data_ptr()
        assert (tables.length[[0, 1, 3]] == 0).all()

    def test_adjacent_entries_are_read_without_a_copy(self) -> None:
        pool, tables = poisoned_pool(SHAPE), TermTables.allocate(1, SHAPE, CPU)
        resident = store(pool, fitting_bundle(SHAPE, 6, 5))
        for entries, adjacent in (([2, 4, 3], True), ([2, 4], False), (list(range(6)), True)):
            alpha = np.full(len(entries), 1 / len(entries), dtype=np.float32)
            terms = page_terms(Retrieval(np.array(entries), alpha), "sqrt", payload_tokens=5, num_entries=6)
            assert isinstance(tables.write(1, resident, terms).tokens, slice) == adjacent

    def test_the_entries_of_a_task_behind_a_gate_are_followed_by_a_null_token(self) -> None:
        pool, tables = poisoned_pool(SHAPE), TermTables.allocate(1, SHAPE, CPU)
        tasks = "aabbba"
        entries = tuple(EntryRecord(id=str(i), task=task, source_digest="ab") for i, task in enumerate(tasks))
        gate = random_gate(fitting_bundle(SHAPE, 6, 5).metadata.backbone)
        facts = {"form": "decoupled", "weighting": "uniform", "activations": {"a": "prompt", "b": "prompt"}}
        gated = fitting_bundle(SHAPE, 6, 5, entries=entries, gate=gate, recipe="refined", **facts)
        whole = fitting_bundle(SHAPE, 6, 5, entries=entries, **facts)
        for bundle, rows, adjacent in (
            (gated, [2, 3, 4], True),
            (gated, [0, 1, 5], False),
            (gated, [4], True),
            (whole, list(range(6)), True),
            (whole, [2, 3, 4], False),
        ):
            resident = store(pool, bundle)
            check_contents(resident, bundle)
            alpha = np.full(len(rows), 1 / len(rows), dtype=np.float32)
            terms = page_terms(Retrieval(np.array(rows), alpha), "uniform", payload_tokens=5, num_entries=6)
            memory = tables.write(1, resident, terms)
            assert isinstance(memory.tokens, slice) == adjacent
            keys, values = memory.read(2)
            own = bundle.payload_keys[2, rows].transpose(0, 1).flatten(1, 2).float()
            assert torch.equal(keys, torch.nn.functional.pad(own, (0, 0, 0, 1)))
            assert not values[:, -1].any()
            assert int(tables.length[1]) == memory.num_tokens - 1 == 5 * len(rows)
            assert tables.token_index[1, : 5 * len(rows)].tolist() == resident.tokens[rows].reshape(-1).tolist()
            resident.region.release()

    def test_a_longer_memory_leaves_nothing_in_a_shorter_one(self) -> None:
        pool, tables = poisoned_pool(SHAPE), TermTables.allocate(1, SHAPE, CPU)
        resident = store(pool, fitting_bundle(SHAPE, 6, 5))
        random_memory(tables, 1, resident, None, False, 0)
        memory = random_memory(tables, 1, resident, 2, True, 1)
        assert memory.num_tokens == int(tables.length[1]) == 10
        assert float(tables.log_remainder[1]) == pytest.approx(np.log(20))
