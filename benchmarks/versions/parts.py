"""Where the time of a load goes: what the API process and a worker do, one after the other, in this process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Literal

import torch

from inducekv_vllm.attention.pages import ResidentBundle
from inducekv_vllm.attention.pool import PagePool, PoolShape
from inducekv_vllm.bundle import Bundle, bundle_digest, read_bundle
from inducekv_vllm.bundle.tensors import check_values, payload_digests
from inducekv_vllm.device import device_of
from inducekv_vllm.engine.memory_index import MemoryIndex

from .contents import Content

Kind = Literal["full", "shared"]
Milliseconds = dict[str, float]


class Stopwatch:
    """Milliseconds by part."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def time(self, part: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.parts[part].append(1000 * (time.perf_counter() - began))

    def medians(self) -> Milliseconds:
        return {part: round(median(values), 1) for part, values in self.parts.items()}


def measure_parts(pair: tuple[Content, Content], pool_entries: int, rounds: int) -> dict[Kind, Milliseconds]:
    """Medians of loading the first of a pair into an empty pool, and the later one beside it."""
    watches: dict[Kind, Stopwatch] = {"full": Stopwatch(), "shared": Stopwatch()}
    pool = None
    for _ in range(rounds):
        residents: list[ResidentBundle] = []
        for content, watch in zip(pair, watches.values(), strict=True):
            if pool is None:
                pool = _pool(read_bundle(content.path, verify=False), pool_entries)
            residents.append(_load(content, pool, watch))
            assert residents[-1].num_shared == content.shared
        for resident in residents:
            resident.region.release()
    return {kind: watch.medians() for kind, watch in watches.items()}


def _load(content: Content, pool: PagePool, watch: Stopwatch) -> ResidentBundle:
    region = pool.allocator.region()
    with watch.time("read"):  # the header's JSON included
        bundle = read_bundle(content.path, verify=False, known=region.share)
    with watch.time("digest_of_metadata_and_keys"):
        bundle_digest(bundle)
    with watch.time("digests_of_payloads"):
        payload_digests(bundle)
    with watch.time("all_checks"):  # both digests included
        check_values(bundle, "bundle")
    with watch.time("index"):
        MemoryIndex.from_bundle(bundle, str(content.path))
    with watch.time("copy_into_pool"):
        return pool.store(bundle, slice(0, pool.shape.num_kv_heads), region)


def _pool(bundle: Bundle, entries: int) -> PagePool:
    backbone = bundle.metadata.backbone
    shape = PoolShape(
        entries=entries,
        num_layers=backbone.num_layers,
        num_kv_heads=backbone.num_kv_heads,
        heads_per_kv_head=2,
        head_size=backbone.head_dim,
    )
    return PagePool(shape, torch.float32, device_of(torch.device("cpu")))
