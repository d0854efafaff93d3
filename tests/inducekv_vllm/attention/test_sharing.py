"""Bundles that share entries in the pool: what is copied, what is kept, and what is overwritten."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inducekv_vllm.attention.pages import ResidentBundle
from inducekv_vllm.attention.placement import null_groups
from inducekv_vllm.attention.pool import PagePool, PoolShape
from inducekv_vllm.bundle import Bundle, EntryRecord, read_bundle, write_bundle
from inducekv_vllm.errors import CapacityError
from tests.inducekv_vllm.attention.pools import CPU, fitting_bundle, store
from tests.inducekv_vllm.attention.test_pool import SHAPE, check_contents
from tests.inducekv_vllm.bundles import older, random_gate, random_maps

L, J, D = SHAPE.num_layers, SHAPE.num_kv_heads, SHAPE.head_size
GROUPS = "abc"


def of_contents(
    contents: Sequence[int],
    form: str = "merged",
    map_rank: int = 0,
    seed: int = 0,
    mark: Callable[[int], float] | None = None,
) -> Bundle:
    """A bundle of 5 tokens an entry; entries of one content have equal payloads, whatever the rest of it.

    With `mark`, payloads and maps consist of their content's mark alone.

    Forms: "merged", "decoupled", and "gated", which is decoupled with the tasks a, b, c behind a gate.
    """
    drawn = [torch.Generator().manual_seed(content) for content in contents]
    payload = [torch.stack([torch.randn(L, J, 5, D, generator=g) for g in drawn], dim=1) for _ in range(2)]
    changes: dict[str, Any] = {"payload_keys": payload[0], "payload_values": payload[1]}
    changes |= {"value_gates": torch.rand(L, generator=torch.Generator().manual_seed(seed)) / 2 + 0.25}
    tasks = [GROUPS[row * 3 // max(len(contents), 3)] if form == "gated" else "t" for row in range(len(contents))]
    changes["entries"] = tuple(EntryRecord(id=str(i), task=t, source_digest="ab") for i, t in enumerate(tasks))
    if form != "merged":
        present = tuple(dict.fromkeys(tasks))
        changes |= {"form": "decoupled", "weighting": "uniform", "activations": dict.fromkeys(present, "prompt")}
        if form == "gated":
            changes["gate"] = random_gate(fitting_bundle(SHAPE, 1, 5).metadata.backbone, present)
    if map_rank:
        maps = [random_maps((L, 1, J, 5, D), map_rank, SHAPE.heads_per_kv_head, 1.0 + content) for content in contents]
        changes |= {name: torch.cat([each[name] for each in maps], dim=1) for name in maps[0]}
    if mark is not None:
        for name in {"payload_keys", "payload_values", "map_in", "map_out"} & changes.keys():
            for row, content in enumerate(contents):
                changes[name][:, row] = mark(content)
    return fitting_bundle(SHAPE, len(contents), 5, seed, **changes)


def empty_pool(entries: int = 40) -> PagePool:
    return PagePool(replace(SHAPE, entries=entries), torch.float32, CPU)


@pytest.mark.parametrize("map_rank", [0, 2])
@pytest.mark.parametrize("form", ["merged", "decoupled", "gated"])
def test_the_next_version_keeps_what_it_shares(form: str, map_rank: int) -> None:
    map_rank = 0 if form == "merged" else map_rank
    pool = empty_pool()
    bundles = [of_contents(c, form, map_rank, seed) for seed, c in enumerate(([0, 1, 2, 3, 4, 5], [0, 1, 2, 9, 4, 5]))]
    first = store(pool, bundles[0])
    before = pool.keys.clone(), pool.values.clone()
    second = store(pool, bundles[1])
    pool.allocator.check()
    assert (first.num_shared, second.num_shared) == (0, 5)
    kept = [0, 1, 2, 4, 5]
    assert np.array_equal(first.tokens[kept], second.tokens[kept])
    assert np.array_equal(first.map_rows[kept], second.map_rows[kept])
    for resident, bundle in ((first, bundles[0]), (second, bundles[1])):
        check_contents(resident, bundle)
    own = torch.from_numpy(first.tokens.reshape(-1))
    assert torch.equal(pool.keys[:, :, own], before[0][:, :, own])
    assert torch.equal(pool.values[:, :, own], before[1][:, :, own])

    first.region.release()
    pool.allocator.check()
    assert first.region.is_free
    gone = torch.from_numpy(first.tokens[3])
    assert not pool.keys[:, :, gone].any()
    assert not pool.values[:, :, gone].any()
    check_contents(second, bundles[1])
    second.region.release()
    pool.allocator.check()
    assert pool.allocator.num_free == pool.allocator.capacity
    assert not pool.keys.any()
    assert not pool.values.any()


def test_groups_that_are_shared_whole_stay_adjacent() -> None:
    """The tasks of earlier entries, in the next version of a gated memory."""
    pool = empty_pool()
    store(pool, of_contents([0, 1, 2, 3, 4, 5], "gated"))
    second = store(pool, of_contents([0, 1, 2, 3, 8, 9], "gated"))
    assert second.num_shared == 4
    nulls = second.null_tokens
    for task in range(3):
        rows = [2 * task, 2 * task + 1]
        adjacent = [*second.tokens[rows].reshape(-1), nulls[rows[1]]]
        assert (np.diff(adjacent) == 1).all()


@pytest.mark.parametrize("form", ["merged", "decoupled", "gated"])
def test_what_is_shared_need_not_be_read(form: str, tmp_path: Path) -> None:
    pool = empty_pool()
    bundles = [of_contents(c, form) for c in ([0, 1, 2, 3], [3, 7, 0, 8])]
    store(pool, bundles[0])
    write_bundle(bundles[1], tmp_path / "b.safetensors")
    region = pool.allocator.region()
    part = read_bundle(tmp_path / "b.safetensors", known=region.share)
    assert part.rows is not None
    assert part.rows.tolist() == [1, 3]
    resident = pool.store(part, slice(0, J), region)
    assert resident.num_shared == 2
    check_contents(resident, bundles[1])
    pool.allocator.check()


def test_what_leaves_while_the_rest_is_read_is_kept(tmp_path: Path) -> None:
    """The version before ends between the header and the payloads of the next."""
    pool = empty_pool()
    bundles = [of_contents(c) for c in ([0, 1, 2, 3], [0, 1, 2, 8])]
    first = store(pool, bundles[0])
    write_bundle(bundles[1], tmp_path / "b.safetensors")
    region = pool.allocator.region()
    part = read_bundle(tmp_path / "b.safetensors", known=region.share)
    first.region.release()
    assert not pool.keys[:, :, torch.from_numpy(first.tokens[3])].any()
    resident = pool.store(part, slice(0, J), region)
    assert resident.num_shared == 3
    check_contents(resident, bundles[1])
    pool.allocator.check()


def test_equal_entries_of_one_bundle() -> None:
    pool = empty_pool()
    bundle = of_contents([0, 0, 1, 0])
    first, second = store(pool, bundle), store(pool, of_contents([0, 2, 0], seed=1))
    pool.allocator.check()
    assert (first.num_shared, second.num_shared) == (0, 2)
    first.region.release()
    pool.allocator.check()
    check_contents(second, of_contents([0, 2, 0], seed=1))
    second.region.release()
    assert not pool.keys.any()


def test_a_bundle_without_payload_digests_shares_nothing() -> None:
    pool = empty_pool()
    bundle = of_contents([0, 1])
    for each in (bundle, older(bundle), older(bundle)):
        resident = store(pool, each)
        assert resident.num_shared == 0
        check_contents(resident, bundle)
    pool.allocator.check()


def test_ranks_agree() -> None:
    """Each holds its own KV head of the same entries at the same places."""
    shape = PoolShape(entries=40, num_layers=L, num_kv_heads=1, heads_per_kv_head=3, head_size=D)
    pools = [PagePool(shape, torch.float32, CPU) for _ in range(2)]
    for contents in ([0, 1, 2, 3], [0, 1, 7, 3]):
        bundle, found = of_contents(contents, "gated", 2), []
        for rank, pool in enumerate(pools):
            resident = pool.store(bundle, slice(rank, rank + 1), pool.allocator.region())
            found.append(resident)
            own = {name: tensor[:, :, rank : rank + 1] for name, tensor in _payloads(bundle).items()}
            check_contents(resident, replace(bundle, **own))
        assert np.array_equal(found[0].tokens, found[1].tokens)
        assert found[0].num_shared == found[1].num_shared


def test_what_does_not_fit_beside_what_is_shared() -> None:
    pool = empty_pool(12)  # 96 tokens
    first = store(pool, of_contents(range(15)))
    with pytest.raises(
        CapacityError, match=r"its 8 entries that are not there yet, of 12, take 40 tokens, 21 of 96 are free; unload"
    ):
        store(pool, of_contents([0, 1, 2, 3, *range(20, 28)]))
    pool.allocator.check()
    check_contents(first, of_contents(range(15)))
    assert store(pool, of_contents([0, 1, 2, *range(20, 24)])).num_shared == 3


def test_a_lack_of_adjacent_tokens_is_named() -> None:
    """Where a pool is too small, entries that stay may leave free tokens that no row of a map fits into."""
    pool = empty_pool(6)  # 16 pages of 3 tokens
    first = store(pool, of_contents(range(9)))
    second = store(pool, of_contents([1, 3, 5, 7]))
    first.region.release()
    found = (
        r"take 27 tokens, 28 of 48 are free, but its 7 rows of maps take 3 adjacent ones each, and there are 6 times 3;"
    )
    with pytest.raises(CapacityError, match=found):
        store(pool, of_contents([10], "decoupled", 7))
    pool.allocator.check()
    check_contents(second, of_contents([1, 3, 5, 7]))
    assert store(pool, of_contents([10], "decoupled", 6)).map_rank == 6


def _payloads(bundle: Bundle) -> dict[str, torch.Tensor]:
    names = ("payload_keys", "payload_values", "map_in", "map_out")
    return {name: tensor for name, tensor in bundle.tensors().items() if name in names}


# ---- random sequences against a brute-force model ------------------------------------------------------------------


@dataclass(eq=False)
class Held:
    """A bundle that somebody holds, and how often."""

    bundle: Bundle
    resident: ResidentBundle
    references: int = 1  # a name, and requests


class Model:
    """What must be in a pool, from what is held alone."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.held: list[Held] = []

    def store(self, bundle: Bundle) -> None:
        there = {digest for held in self.held for digest in held.bundle.metadata.payload_digests}
        expected = sum(digest in there for digest in bundle.metadata.payload_digests)
        resident = store(self.pool, bundle)
        assert resident.num_shared == expected
        self.held.append(Held(bundle, resident))

    def retain(self, held: Held) -> None:
        held.resident.region.retain()
        held.references += 1

    def release(self, held: Held) -> None:
        held.resident.region.release()
        held.references -= 1
        if not held.references:
            assert held.resident.region.is_free
            self.held.remove(held)

    def check(self) -> None:
        """Nothing is lost, nothing is left, and no token belongs to two contents."""
        self.pool.allocator.check()
        owner: dict[int, object] = {}
        for held in self.held:
            check_contents(held.resident, held.bundle)
            resident, G = held.resident, SHAPE.heads_per_kv_head
            digests = held.bundle.metadata.payload_digests
            for row, digest in enumerate(digests):
                places = [*resident.tokens[row], *(r * G + g for r in resident.map_rows[row] for g in range(G))]
                for token in places:
                    assert owner.setdefault(int(token), digest) == digest
            for token in resident.null_tokens.tolist():
                assert owner.setdefault(token, "null") == "null"
            groups = null_groups(held.bundle)
            assert all(len(set(resident.null_tokens[np.array(groups) == group])) == 1 for group in set(groups))
        unowned = torch.tensor(
            [token for token in range(self.pool.shape.num_tokens) if token not in owner], dtype=torch.int64
        )
        assert not self.pool.keys[:, :, unowned].any(), "something is left of what nobody holds"
        assert not self.pool.values[:, :, unowned].any()
        if not self.held:
            assert self.pool.allocator.num_free == self.pool.allocator.capacity


@pytest.mark.parametrize("seed", range(4))
def test_random_loads_replacements_and_failures(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    model = Model(empty_pool(18))
    fill, refused, failed = PagePool._fill, 0, 0
    for _ in range(120):
        kind = rng.random()
        if kind < 0.45 or not model.held:
            form = rng.choice(["merged", "decoupled", "gated"])
            # Few contents: versions share many. A rollback is a load of what was there before.
            contents = rng.choices(range(14), k=rng.randrange(1, 9))
            bundle = of_contents(contents, form, 2 if form == "gated" else 0, seed=rng.randrange(3))
            if rng.random() < 0.2:
                monkeypatch.setattr(PagePool, "_fill", _failing(fill, rng.randrange(L)))
                try:
                    model.store(bundle)
                except ZeroDivisionError:
                    failed += 1
                except CapacityError:
                    refused += 1
                monkeypatch.setattr(PagePool, "_fill", fill)
            else:
                try:
                    model.store(bundle)
                except CapacityError:
                    refused += 1
        elif kind < 0.6:
            model.retain(rng.choice(model.held))  # a request begins
        else:
            model.release(rng.choice(model.held))  # it ends, or the version loses its name
        model.check()
    assert failed
    assert refused
    while model.held:
        model.release(model.held[-1])
        model.check()


def _failing(fill: Any, at_layer: int) -> Any:
    """Fails at a layer, when a part is written."""

    def fail(pool: PagePool, resident: Any, placement: Any, bundle: Any, layer: int, heads: slice) -> None:
        fill(pool, resident, placement, bundle, layer, heads)
        if layer == at_layer:
            raise ZeroDivisionError

    return fail
