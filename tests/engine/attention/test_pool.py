"""The resident pool: what lies where, what does not fit, and what is left of a bundle that is gone (nothing)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from inducekv_vllm.attention.kernel_tables import KernelTables
from inducekv_vllm.attention.pool import MemoryPool, PoolShape
from inducekv_vllm.attention.resident_bundle import LayerMemory, ResidentBundle
from inducekv_vllm.attention.slots import RequestMemory
from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import CapacityError, UnsupportedModel
from inducekv_vllm.retrieval.entry_terms import Retrieval, entry_terms
from tests.bundles import in_layers
from tests.unit.inducekv_vllm.attention.pools import CPU, fitting_bundle, poisoned_pool, random_memory, store

# 54 times 3 tokens; bundles of 4 entries of 5 tokens with maps of rank 2 take 7 + 8 of them
SHAPE = PoolShape(entries=20, num_layers=3, num_kv_heads=2, heads_per_kv_head=3, head_size=8, value_size=8)


def check_contents(resident: ResidentBundle, bundle: Bundle) -> None:
    """Every token and every row of a map is there, in order."""
    for number, layer in enumerate(resident.layers):
        stored: list[tuple[Tensor | None, Tensor | None]] = [
            (layer.keys, bundle.payload_keys),
            (layer.values, bundle.payload_values),
            (layer.map_in, bundle.map_in),
            (layer.map_out, None if bundle.map_out is None else bundle.map_out.transpose(-1, -2)),
        ]
        for found, payload in stored:
            assert (found is None) == (payload is None)
            if found is not None and payload is not None:
                assert torch.equal(found, payload[number].transpose(0, 1).flatten(1, 2).to(found.dtype))


def test_a_bundle_in_some_layers_leaves_the_others_empty() -> None:
    pool = poisoned_pool(SHAPE)
    before = store(pool, fitting_bundle(SHAPE, 4, 5, map_rank=2))
    before.region.release()
    whole = fitting_bundle(SHAPE, 4, 5, 1, map_rank=2)
    some = in_layers(whole, (0, 2))
    resident = store(pool, some)
    stored = replace(resident, layers=(resident.layers[0], resident.layers[2]))
    check_contents(stored, some)
    other = resident.layers[1]
    assert other.map_in is not None
    assert other.map_out is not None
    assert not any(tensor.any() for tensor in (other.keys, other.values, other.map_in, other.map_out))
    assert [layer.value_gate for layer in resident.layers] == pytest.approx([0.7, 0.0, 0.9])
    assert resident.acts.tolist() == [[True, False, True]] * 4
    assert resident.first_layers.tolist() == [0] * 4


def addresses(layers: tuple[LayerMemory, ...]) -> list[int]:
    return [tensor.data_ptr() for layer in layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bundles_come_and_go_and_the_others_stay(dtype: torch.dtype) -> None:
    pool = poisoned_pool(SHAPE, dtype)
    bundles = [fitting_bundle(SHAPE, 4, 5, seed, map_rank=2) for seed in range(4)]
    residents = [store(pool, bundle) for bundle in bundles[:3]]
    stays = addresses(residents[1].layers)
    residents[0].region.release()
    with pytest.raises(
        CapacityError,
        match=r"its 11 entries take 99 adjacent tokens; 72 of 162 are free, at most 45 of them adjacent; "
        r"unload a bundle, or .* larger --memory-pool-entries than 20",
    ):
        store(pool, fitting_bundle(SHAPE, 11, 9))
    residents[0] = store(pool, bundles[3])
    for number, bundle in ((1, bundles[1]), (2, bundles[2]), (0, bundles[3])):
        check_contents(residents[number], bundle)
    assert addresses(residents[1].layers) == stays
    pool.ranges.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_freed_is_overwritten_after_the_last_reference_and_nothing_else(dtype: torch.dtype) -> None:
    pool = poisoned_pool(SHAPE, dtype)
    kept = fitting_bundle(SHAPE, 4, 5, 1, map_rank=2)
    residents = [store(pool, bundle) for bundle in (fitting_bundle(SHAPE, 11, 9), kept)]
    residents[0].region.retain()
    residents[0].region.release()
    assert residents[0].layers[2].keys.any()
    residents[0].region.release()
    assert residents[0].region.is_free
    for layer in residents[0].layers:
        assert not layer.keys.any()
        assert not layer.values.any()
    check_contents(residents[1], kept)
    residents[1].region.release()
    used = slice(0, 3 * (33 + 15))
    assert not pool.keys[:, :, used].any()
    assert not pool.values[:, :, used].any()
    assert pool.num_free_tokens == SHAPE.num_tokens


def test_a_pool_that_holds_nothing_else_holds_the_entries_it_was_made_for() -> None:
    shape = PoolShape(entries=6, num_layers=1, num_kv_heads=1, heads_per_kv_head=4, head_size=8, value_size=8)
    pool = poisoned_pool(shape)
    resident = store(pool, fitting_bundle(shape, 6, 8))
    assert pool.num_free_tokens == 0
    assert resident.nbytes == shape.nbytes(torch.float32) == 6 * 8 * 2 * 8 * 4
    resident.region.release()
    with pytest.raises(CapacityError, match="7 entries take 56 adjacent tokens; 48 of 48"):
        store(pool, fitting_bundle(shape, 7, 8))


def test_a_failed_copy_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = poisoned_pool(SHAPE)
    monkeypatch.setattr(MemoryPool, "_fill", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store(pool, fitting_bundle(SHAPE, 4, 5))
    assert pool.num_free_tokens == SHAPE.num_tokens


def test_a_pool_larger_than_the_machine_is_refused() -> None:
    shape = PoolShape(entries=2**27, num_layers=100, num_kv_heads=8, heads_per_kv_head=1, head_size=128, value_size=128)
    with pytest.raises(CapacityError, match=r"--memory-pool-entries 134217728 needs .* MiB \(6553600 bytes an entry\)"):
        MemoryPool(shape, torch.float32, CPU)


def test_latents_have_values_of_their_own_size() -> None:
    shape = PoolShape(entries=6, num_layers=2, num_kv_heads=1, heads_per_kv_head=4, head_size=12, value_size=8)
    pool = poisoned_pool(shape)
    assert pool.shape.nbytes(torch.float32) == pool.keys.nbytes + pool.values.nbytes
    bundle = fitting_bundle(shape, 3, 5)
    resident = store(pool, bundle)
    check_contents(resident, bundle)
    assert resident.nbytes == 2 * 16 * (12 + 8) * 4  # 15 tokens, in whole rows of 4
    wider = PoolShape(entries=6, num_layers=2, num_kv_heads=1, heads_per_kv_head=4, head_size=12, value_size=12)
    with pytest.raises(UnsupportedModel, match=r"of size 12 \(values of 8\) on this rank, .* KV heads of size 12$"):
        store(pool, fitting_bundle(wider, 3, 5))
    resident.region.release()
    assert not pool.values[:, :, :16].any()


def test_another_geometry_is_refused() -> None:
    other = PoolShape(entries=20, num_layers=4, num_kv_heads=2, heads_per_kv_head=3, head_size=8, value_size=8)
    with pytest.raises(UnsupportedModel, match=r"3 layers of 2 KV heads of size 8 .* 4 layers of 2 KV heads of size 8"):
        store(poisoned_pool(SHAPE), fitting_bundle(other, 2, 2))


def test_adjacent_entries_are_read_without_a_copy() -> None:
    pool, bundle = poisoned_pool(SHAPE), fitting_bundle(SHAPE, 6, 5)
    resident = store(pool, bundle)
    for entries, adjacent in (([2, 4, 3], True), ([2, 4], False), (list(range(6)), True)):
        alpha = np.full(len(entries), 1 / len(entries), dtype=np.float32)
        terms = entry_terms(Retrieval(np.array(entries), alpha), "sqrt", payload_tokens=5, num_entries=6)
        memory = RequestMemory.of(resident, terms, 1)
        keys, _ = memory.read(2)
        assert torch.equal(keys, bundle.payload_keys[2, sorted(entries)].transpose(0, 1).flatten(1, 2).float())
        assert (keys.untyped_storage().data_ptr() == pool.keys.untyped_storage().data_ptr()) == adjacent


def test_a_slot_of_the_tables_holds_the_terms_of_each_entry_in_the_order_of_the_memory() -> None:
    pool, tables = poisoned_pool(SHAPE), KernelTables(3, 6, SHAPE.num_layers, CPU)
    store(pool, fitting_bundle(SHAPE, 2, 5))  # 12 tokens before the others
    bundle = fitting_bundle(SHAPE, 6, 5, map_rank=2)
    resident, slots = store(pool, bundle), tables.slots
    tables.write(random_memory(resident, None, False, seed=0, slot=2))  # longer, and then it is written anew
    weights = np.array([0.5, 0.3, 0.2], dtype=np.float32)
    terms = entry_terms(Retrieval(np.array([3, 0, 1]), weights), "prior", payload_tokens=5, num_entries=6)
    tables.write(RequestMemory.of(resident, terms, 2))
    assert (int(slots.length[2]), int(slots.map_length[2]), int(slots.decoupled[2])) == (15, 6, 1)
    assert (int(slots.entry_tokens[2]), int(slots.map_rank[2])) == (5, 2)
    assert slots.token_index[2, :3].tolist() == [12, 17 - 5, 27 - 10]  # less the tokens before it
    assert slots.map_index[2, :3].tolist() == [14, 16, 20]  # behind 4 + 10 times 3 tokens
    assert torch.equal(slots.log_weight[2, :3], torch.tensor([0.3, 0.2, 0.5]).log())
    torch.testing.assert_close(slots.map_weight[2, :3], torch.tensor([0.3, 0.2, 0.5]))
    assert (slots.key_scale[2, :3] == 1).all()
    assert torch.equal(tables.value_gate[:, 2], bundle.value_gates)
    assert torch.equal(tables.bias[:, 2], bundle.layer_bias)
    assert (slots.length[[0, 1, 3]] == 0).all()


def test_the_tables_do_not_grow_with_the_pool() -> None:
    """Of 256 running requests and 36 layers, as for a pool of 16384 entries, of 8 tokens each."""
    assert KernelTables(2 * 256 + 1, 512, 36, CPU).nbytes < 7 * 2**20
