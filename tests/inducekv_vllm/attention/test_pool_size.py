"""A pool of the size that docs/serving.md tells never refuses a version, whatever the versions share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from inducekv_vllm.attention.page_allocator import PageAllocator, Region, places
from inducekv_vllm.attention.pages import ResidentBundle
from inducekv_vllm.attention.term_tables import TermTables
from inducekv_vllm.bundle import Bundle
from tests.inducekv_vllm.attention.pools import CPU, random_memory
from tests.inducekv_vllm.attention.test_pool import SHAPE
from tests.inducekv_vllm.attention.test_sharing import Held, Model, empty_pool, of_contents

AS_DRAWN = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Name:
    """The size of each version of a name."""

    entries: int
    payload_tokens: int
    map_rank: int = 0
    groups: int = 0  # with a null token each

    @property
    def tokens(self) -> int:
        return self.entries * self.payload_tokens + self.groups

    @property
    def rows(self) -> int:
        return self.entries * self.map_rank


def documented_tokens(names: Sequence[Name], heads_per_kv_head: int) -> int:
    """What is loaded, and once more the most tokens and the most rows of maps of a bundle."""
    G = heads_per_kv_head
    tokens, rows = [-(-name.tokens // G) * G for name in names], [name.rows * G for name in names]
    return sum(tokens) + sum(rows) + max(tokens) + max(rows)


# ---- the allocator: many versions of names of any sizes -----------------------------------------------------------


class Versions:
    """Names in an allocator of the documented size. A version replaces the one before, which leaves after it."""

    def __init__(self, names: Sequence[Name], heads_per_kv_head: int) -> None:
        G = heads_per_kv_head
        self.names = names
        self.allocator = PageAllocator(documented_tokens(names, G) // G, G)
        self.loaded: dict[Name, tuple[Region, list[int]]] = {}
        self._fresh = 0

    def replace(self, name: Name, rng: np.random.Generator, share_of_new: float) -> None:
        there = list(dict.fromkeys(key for other in self.loaded for key in self._keys(other) if _alike(other, name)))
        contents = [int(key) for key in rng.permutation(there)[: name.entries] if rng.random() > share_of_new]
        while len(contents) < name.entries:
            contents.append(self._fresh)
            self._fresh += 1
        region = self.allocator.region()
        shared = region.share(contents)
        new = [key for key in contents if key not in shared]
        m, r, G = name.payload_tokens, name.map_rank, self.allocator.page_tokens
        sizes = np.bincount(np.arange(len(new)) % max(name.groups, 1), minlength=name.groups) * m + (name.groups > 0)
        tokens, rows = region.allocate(*sizes.tolist(), rows=len(new) * r, shared=name.tokens - int(sizes.sum()))
        assert len(np.unique(np.concatenate([tokens, places(rows, G)]))) == sizes.sum() + len(new) * r * G
        of_entries, of_rows = tokens[: len(new) * m].reshape(-1, m), rows.reshape(len(new), r)
        parts = zip(new, of_entries, of_rows, strict=True)
        region.divide([(key, np.concatenate([own, places(maps, G)])) for key, own, maps in parts])
        self.unload(name)
        self.loaded[name] = region, contents
        self.allocator.check()

    def unload(self, name: Name) -> None:
        if name in self.loaded:
            self.loaded.pop(name)[0].release()

    def _keys(self, name: Name) -> list[int]:
        return self.loaded[name][1]


def _alike(first: Name, second: Name) -> bool:
    """Whether their entries can be equal."""
    return (first.payload_tokens, first.map_rank) == (second.payload_tokens, second.map_rank)


SIZES = st.builds(Name, st.integers(1, 60), st.sampled_from([1, 2, 3, 5, 8, 16]), st.sampled_from([0, 0, 1, 4]))
MANY_SMALL = st.builds(Name, st.integers(20, 60), st.sampled_from([1, 2, 3]))
FEW_WITH_MAPS = st.builds(Name, st.integers(1, 8), st.just(1), st.sampled_from([2, 4]), st.just(1))
NAMES = st.one_of(
    st.lists(SIZES, min_size=1, max_size=3, unique=True),
    st.lists(SIZES.map(lambda name: replace(name, groups=-(-name.entries // 3))), min_size=1, max_size=3, unique=True),
    st.tuples(MANY_SMALL, FEW_WITH_MAPS),
)


@settings(AS_DRAWN, max_examples=40)
@given(NAMES, st.sampled_from([1, 2, 3, 4, 7, 8]), st.sampled_from([0.1, 0.3, 0.5, 0.9]), st.integers(0, 2**32))
def test_every_version_finds_room(
    names: Sequence[Name], heads_per_kv_head: int, share_of_new: float, seed: int
) -> None:
    rng, versions = np.random.default_rng(seed), Versions(names, heads_per_kv_head)
    for _ in range(40):
        name = names[0] if rng.random() < 0.6 else names[rng.integers(len(names))]
        if rng.random() < 0.1:
            versions.unload(name)
        else:
            versions.replace(name, rng, share_of_new)


# ---- the pool: what requests read of bundles of the same kind -----------------------------------------------------


@functools.cache
def bundle_of(contents: tuple[int, ...], form: str, map_rank: int) -> Bundle:
    return of_contents(contents, form, map_rank)


def check_what_is_read(tables: TermTables, resident: ResidentBundle, bundle: Bundle, seed: int) -> None:
    """Keys, values and maps of random entries, through the table of a slot."""
    memory = random_memory(tables, 1, resident, max(1, bundle.num_entries // 2), False, seed)
    rows = np.frombuffer(memory.entries, dtype=np.int64).copy()
    nulls = int(bundle.metadata.form == "decoupled")
    for layer, pages in enumerate(resident.layers):
        for found, payload in zip(memory.read(layer), (bundle.payload_keys, bundle.payload_values), strict=True):
            own = payload[layer, rows].transpose(0, 1).flatten(1, 2).float()
            assert torch.equal(found, pad(own, (0, 0, 0, nulls)))
        if bundle.map_in is not None and pages.map_in is not None:
            own = bundle.map_in[layer, rows].transpose(0, 1).flatten(1, 2).float()
            assert torch.equal(pages.map_in[:, memory.map_rows], own)
    places_of_slot = tables.token_index[1, : memory.table_length].long()
    assert places_of_slot.tolist() == resident.tokens[rows].reshape(-1).tolist()


FORMS = st.sampled_from(["merged", "decoupled", "gated", "decoupled with maps", "gated with maps"])


@settings(AS_DRAWN, max_examples=8)
@given(
    st.lists(FORMS, min_size=1, max_size=2, unique=True),
    st.integers(3, 9),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 2**32),
)
def test_every_version_fits_and_is_read_right(forms: list[str], num_entries: int, num_new: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rank = {form: 2 * form.endswith("maps") for form in forms}
    names = {form: Name(num_entries, 5, rank[form], {"g": 3, "d": 1, "m": 0}[form[0]]) for form in forms}
    tokens = documented_tokens(list(names.values()), SHAPE.heads_per_kv_head)
    model = Model(empty_pool(-(-tokens // 8)))
    tables = TermTables.allocate(1, model.pool.shape, CPU)
    contents = {form: list(range(num_entries)) for form in forms}
    loaded: dict[str, Held] = {}
    for version in range(25):
        form = forms[rng.integers(len(forms))]
        for row in rng.choice(num_entries, min(num_new, num_entries), replace=False) if version else []:
            contents[form][row] = int(rng.integers(60))
        bundle = bundle_of(tuple(contents[form]), form.split()[0], rank[form])
        model.store(bundle)
        check_what_is_read(tables, model.held[-1].resident, bundle, version)
        if form in loaded:
            model.release(loaded[form])
        loaded[form] = model.held[-1]
        model.check()
