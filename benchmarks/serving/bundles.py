"""What the servers load beside the model, of random content: bundles of every budget and activation, and an adapter.

The costs do not depend on the content, so no example is extracted and no weight is read.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

from benchmarks.lora_adapter import attach, save
from benchmarks.serving.methods import (
    BUDGETS,
    DECOUPLED_BUDGET,
    GATED,
    LORA,
    PAYLOAD_TOKENS,
    bundle_name,
    decoupled_name,
    gated_name,
)
from inducekv_vllm.backbone.turns import turn_marks
from inducekv_vllm.bundle import Bundle, EntryRecord, Gate, write_bundle
from inducekv_vllm.bundle.activation import ACTIVATIONS
from selector.backbone.model import Backbone
from selector.backbone.token_values import layers_of_gate
from selector.refined.settings import RefinedSettings

TASK = "t"
SEED = 11
PROTOTYPES = 48  # of a layer, as for eight tasks


def make_bundles(backbone: Backbone, names: Container[str], work: Path) -> dict[str, Path]:
    """Those of these names."""
    torch.manual_seed(SEED)
    gated = {gated_name(kind): kind for kind in GATED}
    others: dict[str, dict[str, Any]] = {bundle_name(each): {"entries": each, "weighting": "sqrt"} for each in BUDGETS}
    for activation in ACTIVATIONS:
        fields = {"entries": DECOUPLED_BUDGET, "form": "decoupled", "activations": {TASK: activation}}
        others[decoupled_name(activation)] = fields
    bundles = {name: work / f"{name}.safetensors" for name in (*others, *gated) if name in names}
    for name, path in bundles.items():
        is_gated = name in gated
        write_bundle(gated_bundle(backbone, gated[name]) if is_gated else random_bundle(backbone, **others[name]), path)
    return bundles


def random_bundle(backbone: Backbone, entries: int, payload_tokens: int = PAYLOAD_TOKENS, **fields: Any) -> Bundle:
    """Entries of one task; `fields` are further arguments of `Bundle.create`, or other ones than here."""
    model = backbone.fingerprint
    payload = (model.num_layers, entries, model.num_kv_heads, payload_tokens, model.head_dim)
    given: dict[str, Any] = {
        "retrieval_keys": normalize(torch.randn(entries, model.hidden_size), dim=1),
        "payload_keys": torch.randn(payload),
        "payload_values": 0.01 * torch.randn(payload),
        "temperature": 0.07,
        "value_gates": torch.ones(model.num_layers),
        "layer_bias": torch.zeros(model.num_layers),
        "backbone": model,
        "budget": entries,
        "entries": tuple(EntryRecord(id=str(n), task=TASK, source_digest=str(n)) for n in range(entries)),
        "recipe": "refined",
        "settings": {},
        "weighting": "uniform",
    }
    return Bundle.create(**given | fields)


def gated_bundle(backbone: Backbone, kind: str) -> Bundle:
    """One task of one entry with a map behind a gate, all in the sizes of the default recipe."""
    sizes = RefinedSettings()
    L, J = backbone.num_layers, backbone.num_kv_heads
    width = backbone.num_heads // J * backbone.head_dim
    values = 0.01 * torch.randn(L, 1, J, sizes.payload_tokens, backbone.head_dim)
    map_out = 1e-3 * torch.randn(L, 1, J, width, sizes.map_rank)
    gate = fixed_gate(backbone, is_open=kind != "closed")
    if kind == "same_pass":
        values[: gate.layers[-1]], map_out[: gate.layers[-1]] = 0, 0
    return random_bundle(
        backbone,
        1,
        sizes.payload_tokens,
        payload_values=values,
        map_in=torch.randn(L, 1, J, sizes.map_rank, width) / width**0.5,
        map_out=map_out,
        form="decoupled",
        activations={TASK: kind if kind in ("text", "prompt") else "generation"},
        gate=gate,
    )


def fixed_gate(backbone: Backbone, *, is_open: bool) -> Gate:
    """It looks where a fitted one does, and decides the same of every prompt: of a prototype and its opposite, every
    token is like one.
    """
    layers = layers_of_gate(backbone)
    S, F = len(layers), backbone.num_kv_heads * backbone.head_dim
    some = normalize(torch.randn(S, PROTOTYPES // 2, F), dim=2)
    return Gate(
        layers=layers,
        marks=turn_marks(backbone.processor),
        center=torch.zeros(S, F),
        scale=torch.ones(S, F),
        prototypes=torch.cat([some, -some], dim=1),
        floors=torch.zeros(S, PROTOTYPES),
        weights=torch.full((1, S * PROTOTYPES), 1.0 if is_open else 0.0),
        thresholds=torch.full((1,), 1e-6),
        tasks=(TASK,),
    )


def make_adapter(backbone: Backbone, rank: int, work: Path) -> tuple[Path, int]:
    """A LoRA adapter of every linear layer of the language model: its folder, and its bytes."""
    size = save(attach(backbone, rank, SEED), work / LORA)
    return work / LORA, size
