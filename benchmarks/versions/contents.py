"""Two bundles without a common entry, and a later version of each, in which every tenth entry is another one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import normalize

from inducekv_vllm.bundle import BackboneFingerprint, Bundle, EntryRecord, write_bundle
from inducekv_vllm.fingerprint import backbone_fingerprint

PAYLOAD_TOKENS = 8
REPLACED_EVERY = 10  # entries


class Content(NamedTuple):
    """A bundle, and the number of entries that it shares with its first version."""

    path: Path
    shared: int


def make_contents(
    model: Path, entries: int, work: Path, payload_tokens: int = PAYLOAD_TOKENS
) -> list[tuple[Content, Content]]:
    """Pairs of a bundle of random entries and its later version."""
    backbone = backbone_fingerprint(model)
    pairs = []
    for name, seed in (("a", 0), ("b", 1)):
        first, other = (_random(backbone, entries, payload_tokens, 2 * seed + part) for part in range(2))
        replaced = torch.arange(entries) % REPLACED_EVERY == REPLACED_EVERY - 1  # [B]
        later = {part: tensor.clone() for part, tensor in first.items()}
        later["retrieval_keys"][replaced] = other["retrieval_keys"][replaced]
        for part in ("payload_keys", "payload_values"):
            later[part][:, replaced] = other[part][:, replaced]
        paths = [work / f"{name}.safetensors", work / f"{name}-later.safetensors"]
        for path, tensors in zip(paths, (first, later), strict=True):
            write_bundle(_bundle(backbone, tensors), path)
        pairs.append((Content(paths[0], 0), Content(paths[1], int((~replaced).sum()))))
    return pairs


def _random(backbone: BackboneFingerprint, entries: int, payload_tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """A memory's costs do not depend on its numbers."""
    generator = torch.Generator().manual_seed(seed)
    payload = (backbone.num_layers, entries, backbone.num_kv_heads, payload_tokens, backbone.head_dim)
    return {
        "retrieval_keys": normalize(torch.randn(entries, backbone.hidden_size, generator=generator), dim=1),
        "payload_keys": torch.randn(payload, generator=generator),
        "payload_values": torch.randn(payload, generator=generator),
    }


def _bundle(backbone: BackboneFingerprint, tensors: dict[str, torch.Tensor]) -> Bundle:
    entries, layers = len(tensors["retrieval_keys"]), backbone.num_layers
    return Bundle.create(
        **tensors,
        temperature=0.07,
        value_gates=torch.full((layers,), 0.5),
        layer_bias=torch.zeros(layers),
        backbone=backbone,
        budget=entries,
        entries=tuple(EntryRecord(id=f"random/{n}", task="random", source_digest=f"{n:064x}") for n in range(entries)),
        weighting="prior",
        recipe="random",
        settings={},
    )
