"""Two bundles without a common entry, and a later version of each, in which every tenth entry is another one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.random_bundles import bundle_of, random_entries
from inducekv_vllm.bundle import write_bundle
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
        first, other = (random_entries(backbone, entries, payload_tokens, 2 * seed + part) for part in range(2))
        replaced = torch.arange(entries) % REPLACED_EVERY == REPLACED_EVERY - 1  # [B]
        later = {part: tensor.clone() for part, tensor in first.items()}
        later["retrieval_keys"][replaced] = other["retrieval_keys"][replaced]
        for part in ("payload_keys", "payload_values"):
            later[part][:, replaced] = other[part][:, replaced]
        paths = [work / f"{name}.safetensors", work / f"{name}-later.safetensors"]
        for path, tensors in zip(paths, (first, later), strict=True):
            write_bundle(bundle_of(backbone, tensors), path)
        pairs.append((Content(paths[0], 0), Content(paths[1], int((~replaced).sum()))))
    return pairs
