"""Bundles by extraction alone: which entries are chosen, and that the same settings give the same bundle."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from inducekv_vllm.bundle import read_bundle, write_bundle
from selector.backbone.extraction import extract
from selector.backbone.model import Backbone
from selector.data.choice import k_center
from selector.data.examples import Example
from selector.update.build import build_bundle
from selector.update.settings import BuildSettings
from tests.unit.selector.exact import unit_vectors

SETTINGS = BuildSettings(budget=4, payload_tokens=3, batch_size=5)


def changed(**values: Any) -> BuildSettings:
    return BuildSettings(**(SETTINGS.model_dump() | values))


def test_entries_are_the_extraction_of_the_chosen_examples(
    backbone: Backbone, examples: list[Example], tmp_path: Path
) -> None:
    bundle = build_bundle(backbone, examples, changed(weighting="prior"))
    by_id = {example.id: example for example in examples}
    chosen = [by_id[entry.id] for entry in bundle.metadata.entries]
    assert len({example.id for example in chosen}) == 4
    assert [entry.source_digest for entry in bundle.metadata.entries] == [e.source_digest for e in chosen]
    alone = extract(backbone, chosen, 3, batch_size=1)
    torch.testing.assert_close(bundle.retrieval_keys.float(), alone.keys, rtol=0, atol=1e-3)
    torch.testing.assert_close(bundle.payload_keys.float(), alone.payload_keys, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(bundle.payload_values.float(), alone.payload_values, rtol=2e-3, atol=2e-3)
    assert float(bundle.temperature) == pytest.approx(0.07)
    assert bundle.value_gates.tolist() == [0.5] * backbone.num_layers
    assert bundle.layer_bias.tolist() == [0.0] * backbone.num_layers
    assert (bundle.metadata.weighting, bundle.metadata.recipe) == ("prior", "build")
    bundle.require_backbone(backbone.fingerprint)
    write_bundle(bundle, tmp_path / "m.safetensors")
    assert read_bundle(tmp_path / "m.safetensors").digest == bundle.digest


def test_k_center_covers_within_twice_the_optimum() -> None:
    """The greedy traversal's known guarantee, against all choices of three of ten keys."""
    keys = unit_vectors(10, 4, seed=1).double()

    def radius(rows: Any) -> float:
        return float(torch.cdist(keys, keys[list(rows)]).amin(dim=1).max())

    best = min(radius(rows) for rows in combinations(range(10), 3))
    assert all(radius(k_center(keys, 3, first=first)) <= 2 * best for first in range(10))
