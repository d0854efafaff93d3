"""What the servers of the benchmark load: a model, bundles of every budget and activation, and a LoRA adapter.

The model is the demo's LLaVA wrapper, tower, tokenizer and processor around a language model of any geometry, whose
layers are Qwen3's. Its costs are the language model's; its answers mean nothing.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Container
from pathlib import Path

import torch
from torch.nn.functional import normalize
from transformers import AutoModelForImageTextToText, LlavaConfig, PreTrainedTokenizerFast, Qwen3Config

from benchmarks.demo.model import build_config, export
from benchmarks.geometries import Geometry
from benchmarks.lora_adapter import attach, largest_rank, memory_bytes, save
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
from inducekv_vllm.bundle import Bundle, EntryRecord, Gate, read_bundle, write_bundle
from inducekv_vllm.bundle.activation import ACTIVATIONS
from selector.backbone.model import Backbone
from selector.backbone.token_values import layers_of_gate
from selector.refined.settings import RefinedSettings
from selector.update.measures import entry_bytes
from server.demo import CHECKPOINT

MODEL_SEED = 0
TASK = "t"
PROTOTYPES = 48  # of a layer, as for eight tasks


def config_of(geometry: Geometry) -> LlavaConfig:
    config = build_config()
    text = config.text_config
    assert isinstance(text, Qwen3Config)
    text.hidden_size = geometry.hidden_size
    text.intermediate_size = geometry.intermediate_size
    text.num_hidden_layers = geometry.layers
    text.num_attention_heads = geometry.heads
    text.num_key_value_heads = geometry.kv_heads
    text.head_dim = geometry.head_size
    text.layer_types = ["full_attention"] * geometry.layers
    return config


def make_model(geometry: Geometry, dtype: str, directory: Path) -> Path:
    """Write a checkpoint with random weights to `directory`, the same bytes every time on one kind of device."""
    torch.manual_seed(MODEL_SEED)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config_of(geometry), dtype=getattr(torch, dtype))
    export(model, PreTrainedTokenizerFast.from_pretrained(CHECKPOINT), directory)
    del model
    torch.cuda.empty_cache()  # the servers need the GPU
    return directory


SEED = 11


def build_bundles(backbone: Backbone, model: Path, names: Container[str], tasks: Path, work: Path) -> dict[str, Path]:
    """Those of these names: one a budget, of examples of `tasks`, by the command a user would run; decoupled memory,
    which is made of one of them; and memory behind a gate.
    """
    wants_decoupled = any(decoupled_name(activation) in names for activation in ACTIVATIONS)
    bundles = {}
    for budget in BUDGETS:
        name, path = bundle_name(budget), work / f"B{budget}.safetensors"
        if name not in names and not (budget == DECOUPLED_BUDGET and wants_decoupled):
            continue
        bundles[name] = path
        command = ["build", "--model", model, "--task", tasks, "--budget", budget, "--payload-tokens", PAYLOAD_TOKENS]
        command += ["--policy", "random", "--weighting", "sqrt", "--seed", SEED, "--output", path]
        subprocess.run([sys.executable, "-m", "selector.cli.bundle", *map(str, command)], check=True, stdout=sys.stderr)
    if wants_decoupled:
        bundles |= decouple(bundles[bundle_name(DECOUPLED_BUDGET)], work)
    return {name: path for name, path in (bundles | gated_bundles(backbone, work)).items() if name in names}


def gated_bundles(backbone: Backbone, work: Path) -> dict[str, Path]:
    """One task of one entry with a map behind a gate, all in the sizes of the default recipe; of random content.

    The costs do not depend on it. The gates open for every prompt, or for none.
    """
    sizes, generator = RefinedSettings(), torch.Generator().manual_seed(SEED)
    model_facts = backbone.fingerprint
    L, J, D = model_facts.num_layers, model_facts.num_kv_heads, model_facts.head_dim
    width = backbone.num_heads // J * D
    payload = (L, 1, J, sizes.payload_tokens, D)
    bundles = {gated_name(kind): work / f"gated_{kind}.safetensors" for kind in GATED}
    for kind, path in zip(GATED, bundles.values(), strict=True):
        values = 0.01 * torch.randn(payload, generator=generator)
        map_out = 1e-3 * torch.randn(L, 1, J, width, sizes.map_rank, generator=generator)
        gate = fixed_gate(backbone, is_open=kind != "closed")
        if kind == "same_pass":
            values[: gate.layers[-1]], map_out[: gate.layers[-1]] = 0, 0
        bundle = Bundle.create(
            retrieval_keys=normalize(torch.randn(1, model_facts.hidden_size, generator=generator), dim=1),
            payload_keys=torch.randn(payload, generator=generator),
            payload_values=values,
            map_in=torch.randn(L, 1, J, sizes.map_rank, width, generator=generator) / width**0.5,
            map_out=map_out,
            temperature=0.07,
            value_gates=torch.ones(L),
            layer_bias=torch.zeros(L),
            backbone=model_facts,
            budget=1,
            entries=(EntryRecord(id="0", task=TASK, source_digest="0"),),
            recipe="refined",
            settings={},
            weighting="uniform",
            form="decoupled",
            activations={TASK: kind if kind in ("text", "prompt") else "generation"},
            gate=gate,
        )
        write_bundle(bundle, path)
    return bundles


def fixed_gate(backbone: Backbone, *, is_open: bool) -> Gate:
    """It looks where a fitted one does, and decides the same of every prompt: of a prototype and its opposite, every
    token is like one.
    """
    layers = layers_of_gate(backbone.num_layers)
    S, F = len(layers), backbone.num_kv_heads * backbone.head_dim
    some = normalize(torch.randn(S, PROTOTYPES // 2, F, generator=torch.Generator().manual_seed(SEED)), dim=2)
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


def decouple(merged: Path, work: Path) -> dict[str, Path]:
    """The keys of a merged bundle as decoupled memory, with each activation.

    The costs do not depend on values. These are other ones than the merged bundle's: a server that has both would share
    the entries, and the decoupled memory would lie apart from its null token.
    """
    bundle = read_bundle(merged)
    fields = ("backbone", "budget", "entries", "recipe", "settings")
    bundles = {decoupled_name(activation): work / f"{activation}.safetensors" for activation in ACTIVATIONS}
    for activation, path in zip(ACTIVATIONS, bundles.values(), strict=True):
        decoupled = Bundle.create(
            **bundle.tensors() | {"payload_values": 0.5 * bundle.payload_values},
            **{name: getattr(bundle.metadata, name) for name in fields},
            weighting="uniform",
            form="decoupled",
            activations=dict.fromkeys(bundle.metadata.tasks, activation),
        )
        write_bundle(decoupled, path)
    return bundles


def stored_bytes(bundles: dict[str, Path], name: str) -> int:
    """Of a method's bundle (paper, Eq. bytes_per_entry); 0 if the model of this name has no memory."""
    if name not in bundles:
        return 0
    return entry_bytes(read_bundle(bundles[name], verify=False))


def save_adapter(backbone: Backbone, work: Path) -> tuple[Path, int, int]:
    """A LoRA adapter of every linear layer, no larger than the 64 entries of decoupled memory: folder, rank, bytes."""
    rank = largest_rank(backbone, memory_bytes(backbone, DECOUPLED_BUDGET, PAYLOAD_TOKENS, gated_tasks=0))
    size = save(attach(backbone, rank, SEED), work / LORA)
    return work / LORA, rank, size
