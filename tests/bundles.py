"""Small bundles of random content for tests."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from inducekv_vllm.bundle import BackboneFingerprint, Bundle, EntryRecord, Gate
from inducekv_vllm.bundle.activation import Activation
from inducekv_vllm.gate import BUCKETS, TurnMarks

L, J, G, D, d = 3, 2, 2, 8, 16
MAP_RANK = 3
FINGERPRINT = BackboneFingerprint(
    architecture="TinyForConditionalGeneration/tiny",
    num_layers=L,
    num_kv_heads=J,
    head_dim=D,
    hidden_size=d,
    rope={"rope_theta": 10000.0, "rope_type": "default"},
    norm={"eps": 1e-6},
    tokenizer_digest="0" * 64,
    weights_digest="0" * 64,
)


def random_bundle(num_entries: int = 5, payload_tokens: int = 4, seed: int = 0, **changes: Any) -> Bundle:
    """A consistent bundle; `changes` replace arguments of `Bundle.create`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    arguments: dict[str, Any] = {
        "retrieval_keys": torch.nn.functional.normalize(draw(num_entries, d), dim=1),
        "payload_keys": draw(L, num_entries, J, payload_tokens, D),
        "payload_values": draw(L, num_entries, J, payload_tokens, D),
        "temperature": 0.07,
        "value_gates": torch.full((L,), 0.5),
        "layer_bias": torch.zeros(L),
        "backbone": FINGERPRINT,
        "budget": num_entries,
        "entries": tuple(EntryRecord(id=f"e{i}", task="t", source_digest="ab") for i in range(num_entries)),
        "weighting": "sqrt",
        "recipe": "build",
        "settings": {"seed": seed, "policy": "random"},
    }
    return Bundle.create(**(arguments | changes))


def random_gate(
    backbone: BackboneFingerprint = FINGERPRINT,
    tasks: Sequence[str] = ("a", "b"),
    *,
    layers: Sequence[int] = (0, 2),
    num_prototypes: int = 4,
    seed: int = 0,
    **changes: Any,
) -> Gate:
    """A gate of random content; `changes` replace fields of `Gate`."""
    generator = torch.Generator().manual_seed(seed)
    S, P, F, C = len(layers), num_prototypes, backbone.num_features, len(tasks)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    fields: dict[str, Any] = {
        "layers": tuple(layers),
        "marks": TurnMarks((), None),
        "center": draw(S, F) / 4,
        "scale": 0.5 + draw(S, F).abs(),
        "prototypes": torch.nn.functional.normalize(draw(S, P, F), dim=2),
        "floors": torch.rand(S, P, generator=generator) / 2,
        "weights": 4 * draw(C, S * P),
        "thresholds": torch.rand(C, generator=generator) + 0.1,
        "tasks": tuple(tasks),
    }
    return Gate(**(fields | changes))


def classified_gate(
    backbone: BackboneFingerprint = FINGERPRINT,
    tasks: Sequence[str] = ("a", "b"),
    *,
    classified: int = 3,
    seed: int = 0,
    **changes: Any,
) -> Gate:
    """A gate of random classifiers that were fitted to so many tasks, without prototypes."""
    generator = torch.Generator().manual_seed(seed)
    plain = random_gate(backbone, tasks, num_prototypes=0, seed=seed)
    S, K, F = len(plain.layers), classified, plain.center.shape[1]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    fields: dict[str, Any] = {
        "directions": draw(K, S, F) / 2,
        "rarity": 0.5 + draw(BUCKETS).abs(),
        "words": 4 * draw(K, BUCKETS),
        "offsets": draw(2, K),
        "clause_ends": torch.tensor([3, 5], dtype=torch.int32),
        "weights": 4 * draw(len(tasks), 2 * K),
    }
    return replace(plain, **(fields | changes))


def decided_gate(
    task: str | None, backbone: BackboneFingerprint = FINGERPRINT, tasks: Sequence[str] = ("a", "b"), **changes: Any
) -> Gate:
    """A gate that sends every prompt to one task, or stays closed for every prompt.

    Of a prototype and its opposite, every token is like one.
    """
    F = backbone.num_features
    direction = torch.nn.functional.normalize(torch.randn(F, generator=torch.Generator().manual_seed(0)), dim=0)
    fields: dict[str, Any] = {
        "center": torch.zeros(1, F),
        "scale": torch.ones(1, F),
        "prototypes": torch.stack([direction, -direction])[None],
        "floors": torch.zeros(1, 2),
        "weights": torch.tensor([[1e6 if name == task else 0.0] * 2 for name in tasks]),  # [C, 2]
        "thresholds": torch.full((len(tasks),), 1e-3),
    }
    return random_gate(backbone, tasks, layers=(0,), num_prototypes=2, **(fields | changes))


def random_gated_bundle(seed: int = 0, **changes: Any) -> Bundle:
    """Five entries of the tasks "a" and "b" behind a relevance gate."""
    arguments: dict[str, Any] = {
        "entries": tuple(EntryRecord(id=f"e{i}", task="aabab"[i], source_digest="ab") for i in range(5)),
        "weighting": "prior",
        "recipe": "refined",
        "gate": random_gate(seed=seed),
    }
    return random_bundle(seed=seed, **(arguments | changes))


def random_maps(shape: Sequence[int], rank: int, heads_per_kv_head: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """map_in and map_out for payloads of `shape` [L, B, J, m, D]; each map's gain is about `scale`."""
    layers, entries, kv_heads, _, head_dim = shape
    generator = torch.Generator().manual_seed(rank)
    width = heads_per_kv_head * head_dim
    inner, outer = (torch.randn(layers, entries, kv_heads, rank, width, generator=generator) for _ in range(2))
    scale /= math.sqrt(width * width * rank)
    return {"map_in": inner, "map_out": outer.transpose(-1, -2) * scale * math.sqrt(width)}


def gated_decoupled_bundle() -> Bundle:
    """Rows 0, 1 and 3 of the task "a", 2 and 4 of "b", with maps."""
    form: dict[str, Any] = {"form": "decoupled", "weighting": "uniform"}
    form |= {"activations": {"a": "prompt", "b": "generation"}}
    return random_gated_bundle(**form, **random_maps((L, 5, J, 4, D), 3, G))


def remade(bundle: Bundle, **changes: Any) -> Bundle:
    """A bundle created again, with its gate; `changes` replace arguments of `Bundle.create`."""
    kept = (
        "backbone",
        "budget",
        "entries",
        "weighting",
        "recipe",
        "settings",
        "form",
        "activations",
        "payload_dtype",
        "layers",
    )
    facts = {name: getattr(bundle.metadata, name) for name in kept} | {"gate": bundle.gate}
    tensors = {name: tensor for name, tensor in bundle.tensors().items() if not name.startswith("gate_")}
    return Bundle.create(**(tensors | facts | changes))


def as_decoupled(
    merged: Bundle,
    activation: Activation,
    weighting: str = "uniform",
    scale: float = 6.0,
    map_rank: int = 0,
    heads_per_kv_head: int = 2,
    **changes: Any,
) -> Bundle:
    """A merged bundle's entries as decoupled memory, its values times `scale`; some gates are negative or above 1.

    `changes` replace arguments of `Bundle.create`.
    """
    maps = random_maps(merged.payload_keys.shape, map_rank, heads_per_kv_head) if map_rank else {}
    return remade(
        merged,
        payload_values=scale * merged.payload_values,
        value_gates=torch.linspace(-0.5, 1.5, merged.num_layers),
        layer_bias=torch.linspace(-1.0, 0.5, merged.num_layers),
        weighting=weighting,
        form="decoupled",
        activations=dict.fromkeys(merged.metadata.tasks, activation),
        **maps,
        **changes,
    )


def in_layers(bundle: Bundle, layers: Sequence[int]) -> Bundle:
    """Decoupled memory with the payloads of these layers alone."""
    names = ("payload_keys", "payload_values", "value_gates", "layer_bias", "map_in", "map_out")
    tensors = {name: tensor[list(layers)] for name, tensor in bundle.tensors().items() if name in names}
    return remade(bundle, layers=tuple(layers), **tensors)


def by_default(
    merged: Bundle, activation: Activation, heads_per_kv_head: int, scale: float = 6.0, map_rank: int = MAP_RANK
) -> Bundle:
    """A merged bundle's entries in the form that `inducekv-select` makes by default.

    Decoupled and uniform, with maps of the attention output, behind a gate. Its one task's gate opens for every prompt.
    """
    (task,) = merged.metadata.tasks
    weights, thresholds = torch.full((1, 2), 2.0), torch.full((1,), 1e-2)
    gate = decided_gate(task, merged.metadata.backbone, (task,), weights=weights, thresholds=thresholds)
    maps = {"map_rank": map_rank, "heads_per_kv_head": heads_per_kv_head}
    return as_decoupled(merged, activation, scale=scale, **maps, recipe="refined", gate=gate)
