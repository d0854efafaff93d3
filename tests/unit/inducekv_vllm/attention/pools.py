"""Small pools for tests. They are full of NaN, so what is read by mistake shows."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from inducekv_vllm.attention.host_bundle import HostBundle
from inducekv_vllm.attention.pool import MemoryPool, PoolShape
from inducekv_vllm.attention.resident_bundle import ResidentBundle
from inducekv_vllm.attention.slots import RequestMemory
from inducekv_vllm.bundle import Bundle, EntryRecord
from inducekv_vllm.retrieval.entry_terms import Retrieval, entry_terms
from inducekv_vllm.vllm_seams.device import device_of
from tests.bundles import FINGERPRINT, random_bundle, random_maps

CPU = device_of(torch.device("cpu"))


def poisoned_pool(shape: PoolShape, dtype: torch.dtype = torch.float32) -> MemoryPool:
    pool = MemoryPool(shape, dtype, CPU)
    pool.keys.fill_(math.nan)
    pool.values.fill_(math.nan)
    return pool


def fitting_bundle(
    shape: PoolShape, num_entries: int, payload_tokens: int, seed: int = 0, map_rank: int = 0, **changes: Any
) -> Bundle:
    """A random bundle for this pool, of merged memory if `changes` do not say otherwise; one with maps is decoupled."""
    L, J, D, V = shape.num_layers, shape.num_kv_heads, shape.head_size, shape.value_size
    sizes = {"num_layers": L, "num_kv_heads": J, "head_dim": D, "value_dim": None if V == D else V}
    backbone = FINGERPRINT.model_copy(update=sizes)
    generator = torch.Generator().manual_seed(seed)
    payload = [torch.randn(L, num_entries, J, payload_tokens, size, generator=generator) for size in (D, V)]
    if map_rank:
        changes = {"form": "decoupled", "weighting": "prior", "activations": {"t": "prompt"}} | changes
        changes |= random_maps(payload[0].shape, map_rank, shape.heads_per_kv_head)
    arguments: dict[str, Any] = {
        "backbone": backbone,
        "payload_keys": payload[0],
        "payload_values": payload[1],
        "value_gates": torch.linspace(0.7, 0.9, L),
        "layer_bias": torch.linspace(-0.4, 0.3, L),
        "entries": tuple(EntryRecord(id=str(i), task="t", source_digest="ab") for i in range(num_entries)),
    }
    return random_bundle(num_entries, payload_tokens, seed, **(arguments | changes))


def store(pool: MemoryPool, bundle: Bundle) -> ResidentBundle:
    return pool.store(HostBundle.of(bundle), slice(0, pool.shape.num_kv_heads))


def random_memory(
    bundle: ResidentBundle, top_k: int | None, remainder: bool, seed: int, slot: int = 1
) -> RequestMemory:
    """Random entries with random weights."""
    rng = np.random.default_rng(seed)
    entries = rng.permutation(bundle.num_entries)[:top_k]
    weights = rng.dirichlet(np.ones(len(entries))).astype(np.float32)
    terms = entry_terms(
        Retrieval(entries, weights),
        bundle.weighting,
        payload_tokens=bundle.payload_tokens,
        num_entries=bundle.num_entries,
        remainder=remainder,
    )
    return RequestMemory.of(bundle, terms, slot)


def full_attention() -> Any:
    """The configuration of a KV cache of one group."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec.__new__(FullAttentionSpec)
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
