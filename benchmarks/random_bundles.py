"""Bundles of random entries: a memory's costs do not depend on its numbers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from inducekv_vllm.bundle import BackboneFingerprint, Bundle, EntryRecord
from inducekv_vllm.retrieval.page_terms import Weighting

TEMPERATURE = 0.07  # the paper's start


def random_entries(backbone: BackboneFingerprint, entries: int, payload_tokens: int, seed: int) -> dict[str, Tensor]:
    """Keys and payloads of so many entries, by their names in a bundle."""
    generator = torch.Generator().manual_seed(seed)
    payload = (backbone.num_layers, entries, backbone.num_kv_heads, payload_tokens, backbone.head_dim)
    return {
        "retrieval_keys": normalize(torch.randn(entries, backbone.hidden_size, generator=generator), dim=1),
        "payload_keys": torch.randn(payload, generator=generator),
        "payload_values": 0.01 * torch.randn(payload, generator=generator),
    }


def bundle_of(backbone: BackboneFingerprint, tensors: dict[str, Tensor], weighting: Weighting = "prior") -> Bundle:
    """A merged memory of these entries, as large as its budget."""
    entries, layers = len(tensors["retrieval_keys"]), backbone.num_layers
    return Bundle.create(
        **tensors,
        temperature=TEMPERATURE,
        value_gates=torch.full((layers,), 0.5),
        layer_bias=torch.zeros(layers),
        backbone=backbone,
        budget=entries,
        entries=tuple(EntryRecord(id=f"random/{n}", task="random", source_digest=f"{n:064x}") for n in range(entries)),
        weighting=weighting,
        recipe="random",
        settings={},
    )
