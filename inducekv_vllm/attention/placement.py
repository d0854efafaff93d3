"""Where the entries of a bundle lie in the pool: those that are there already, and those that are new.

Shapes: B entries, N of them new, m payload tokens, r rank of a map, G query heads of a KV head.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable

import numpy as np

from ..bundle import Bundle
from ..retrieval.page_terms import IntArray
from .page_allocator import Content, Region, places


class Placement:
    """The new tokens lie group by group, each followed by a null token; the new rows of maps lie elsewhere.

    A group whose entries are all shared keeps its null token, if it has one. So what is adjacent in a bundle is
    adjacent in the pool if there is room, but for groups of which a part is shared.
    """

    def __init__(self, bundle: Bundle, heads_per_kv_head: int) -> None:
        """Every entry is new."""
        B, m, r = bundle.num_entries, bundle.payload_tokens, map_rank(bundle)
        self._heads_per_kv_head = heads_per_kv_head
        self._groups = np.array(null_groups(bundle), dtype=np.int64)  # [B]; [0] without null tokens
        self.tokens = np.empty((B, m), dtype=np.int64)  # places in the pool
        self.map_rows = np.empty((B, r), dtype=np.int64)  # places among the rows of maps
        self.null_tokens = np.empty(len(self._groups), dtype=np.int64)  # [B] or [0] places in the pool
        self.new = np.arange(B)  # [N] entries
        self._groups_of_new_nulls = np.unique(self._groups)
        self.new_nulls = np.empty(0, dtype=np.int64)  # places in the pool

    @classmethod
    def of(cls, bundle: Bundle, region: Region, heads_per_kv_head: int) -> Placement:
        """Let the region share what is in the pool; the rest has no place yet.

        Raises:
            AssertionError: a payload was neither read with the bundle nor is it in the pool.
        """
        placement = cls(bundle, heads_per_kv_head)
        digests = bundle.metadata.payload_digests
        shared = region.share(digests)
        placement._keep({row: shared[digest] for row, digest in enumerate(digests) if digest in shared})
        placement._keep_nulls(region)
        assert bundle.rows is None or np.isin(placement.new, bundle.rows).all()
        return placement

    @property
    def num_shared(self) -> int:
        return len(self.tokens) - len(self.new)

    @property
    def new_tokens(self) -> int:
        """Tokens that are needed: the new entries', their rows of maps, and null tokens."""
        r, G = self.map_rows.shape[1], self._heads_per_kv_head
        return sum(self._new_groups()) + len(self.new) * r * G

    def lie_in(self, region: Region) -> None:
        """Take room for what is new. Raises CapacityError."""
        N, m, r = len(self.new), self.tokens.shape[1], self.map_rows.shape[1]
        sizes = self._new_groups()
        whole = self.tokens.size + len(np.unique(self._groups))
        of_tokens, of_maps = region.allocate(*sizes, rows=N * r, shared=whole - sum(sizes))
        groups, nulls = self._groups_of(self.new), self._groups_of_new_nulls
        nulls_before = np.searchsorted(nulls, groups) if len(groups) else np.zeros(N, dtype=np.int64)  # [N]
        self.tokens[self.new] = of_tokens[np.arange(N)[:, None] * m + nulls_before[:, None] + np.arange(m)]
        # A group's null token follows its entries.
        self.new_nulls = of_tokens[np.searchsorted(groups, nulls, side="right") * m + np.arange(len(nulls))]
        for group, null in zip(nulls.tolist(), self.new_nulls.tolist(), strict=True):
            self.null_tokens[self._groups == group] = null
        self.map_rows[self.new] = of_maps.reshape(N, r)

    def sources(self, bundle: Bundle) -> IntArray:
        """[N] where the bundle's payloads have the new entries."""
        return self.new if bundle.rows is None else np.searchsorted(bundle.rows, self.new)

    def pieces(self, bundle: Bundle) -> list[tuple[Hashable, IntArray]]:
        """The contents that lie in the new tokens: what others find them by, and their tokens."""
        digests = bundle.metadata.payload_digests
        keys: list[Hashable] = [digests[row] if digests else None for row in self.new.tolist()]
        return [
            *zip(keys, self._tokens_of(self.new), strict=True),
            *((_null_key(null), np.array([null])) for null in self.new_nulls.tolist()),
        ]

    def all_tokens(self) -> IntArray:
        """Every token that the bundle reads, in no order, some of them twice."""
        every = np.arange(len(self.tokens))
        return np.concatenate([self._tokens_of(every).reshape(-1), self.null_tokens])

    def _keep(self, shared: dict[int, Content]) -> None:
        """These entries are in the pool."""
        if not shared:
            return
        m, G = self.tokens.shape[1], self._heads_per_kv_head
        rows = np.array(list(shared))
        tokens = np.stack([content.tokens for content in shared.values()])  # [., m + r G]
        self.tokens[rows] = tokens[:, :m]
        self.map_rows[rows] = tokens[:, m::G] // G
        self.new = np.setdiff1d(self.new, rows)
        self._groups_of_new_nulls = np.unique(self._groups_of(self.new))

    def _keep_nulls(self, region: Region) -> None:
        """Groups that are shared whole share the null token behind them; those without one get a new one."""
        for group in np.setdiff1d(self._groups, self._groups_of_new_nulls).tolist():
            of_group = self._groups == group
            key = _null_key(int(self.tokens[of_group][-1, -1]) + 1)
            if (null := region.share([key]).get(key)) is not None:
                self.null_tokens[of_group] = null.tokens[0]
            else:
                self._groups_of_new_nulls = np.union1d(self._groups_of_new_nulls, [group])

    def _new_groups(self) -> list[int]:
        """New tokens of each group that has any, its null token included; without null tokens, all are one group."""
        m = self.tokens.shape[1]
        if not len(self._groups):
            return [len(self.new) * m]
        entries = np.bincount(self._groups[self.new], minlength=int(self._groups[-1]) + 1)
        return [int(entries[group]) * m + 1 for group in self._groups_of_new_nulls.tolist()]

    def _groups_of(self, rows: IntArray) -> IntArray:
        return self._groups[rows] if len(self._groups) else self._groups

    def _tokens_of(self, rows: IntArray) -> IntArray:
        """[n, m + r G]: the tokens of n entries, and those that their rows of maps lie in."""
        r, G = self.map_rows.shape[1], self._heads_per_kv_head
        maps = places(self.map_rows[rows].reshape(-1), G).reshape(len(rows), r * G)
        return np.concatenate([self.tokens[rows], maps], axis=1)


def map_rank(bundle: Bundle) -> int:
    return 0 if bundle.metadata.output_map is None else bundle.metadata.output_map.rank


def null_groups(bundle: Bundle) -> list[int]:
    """The group of each entry of decoupled memory: entries of one group are followed by one null token.

    They are read together, and adjacent tokens without a copy: behind a gate the entries of a task, otherwise all
    entries. Merged memory has no null tokens.
    """
    if bundle.metadata.form == "merged":
        return []
    tasks = [entry.task if bundle.gate is not None else "" for entry in bundle.metadata.entries]
    changes = [previous != task for previous, task in itertools.pairwise(tasks)]
    return list(itertools.accumulate(changes, initial=0))[: len(tasks)]


def _null_key(token: int) -> Hashable:
    return "null token", token
