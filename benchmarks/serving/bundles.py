"""What the servers of the benchmark load: a model, bundles of every budget and activation, and a LoRA adapter.

The model is the demo's LLaVA wrapper, tower, tokenizer and processor around a language model of any geometry, whose
layers are Qwen3's. Its costs are the language model's; its answers mean nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedTokenizerFast, Qwen3Config

from benchmarks.demo.model import build_config, export
from benchmarks.geometries import Geometry
from benchmarks.lora_adapter import attach, largest_rank, memory_bytes, save
from benchmarks.serving.methods import BUDGETS, DECOUPLED_BUDGET, LORA, PAYLOAD_TOKENS, bundle_name, decoupled_name
from inducekv_vllm.bundle import Bundle, read_bundle, write_bundle
from inducekv_vllm.bundle.activation import ACTIVATIONS
from selector.backbone.model import Backbone
from selector.update.measures import entry_bytes
from server.demo import CHECKPOINT

MODEL_SEED = 0


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


def make_model(geometry: Geometry, directory: Path) -> Path:
    """Write a checkpoint with random weights to `directory`, the same bytes every time."""
    torch.manual_seed(MODEL_SEED)
    model = LlavaForConditionalGeneration(config_of(geometry))
    return export(model, PreTrainedTokenizerFast.from_pretrained(CHECKPOINT), directory)


SEED = 11


def build_bundles(model: Path, tasks: Path, work: Path) -> dict[str, Path]:
    """One bundle a budget, of examples of `tasks`, by the command a user would run; and decoupled memory."""
    bundles = {bundle_name(budget): work / f"B{budget}.safetensors" for budget in BUDGETS}
    for budget, path in zip(BUDGETS, bundles.values(), strict=True):
        command = ["build", "--model", model, "--task", tasks, "--budget", budget, "--payload-tokens", PAYLOAD_TOKENS]
        command += ["--policy", "random", "--weighting", "sqrt", "--seed", SEED, "--output", path]
        subprocess.run([sys.executable, "-m", "selector.cli.bundle", *map(str, command)], check=True, stdout=sys.stderr)
    return bundles | decouple(bundles[bundle_name(DECOUPLED_BUDGET)], work)


def decouple(merged: Path, work: Path) -> dict[str, Path]:
    """The keys of a merged bundle as decoupled memory, with each activation.

    The costs do not depend on values. These are other ones than the merged bundle's: a server that has both would share
    the entries, and the decoupled memory would lie apart from its null token.
    """
    bundle = read_bundle(merged)
    facts = ("backbone", "budget", "entries", "recipe", "settings")
    bundles = {decoupled_name(activation): work / f"{activation}.safetensors" for activation in ACTIVATIONS}
    for activation, path in zip(ACTIVATIONS, bundles.values(), strict=True):
        decoupled = Bundle.create(
            **bundle.tensors() | {"payload_values": 0.5 * bundle.payload_values},
            **{name: getattr(bundle.metadata, name) for name in facts},
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


def save_adapter(model: Path, work: Path) -> tuple[Path, int, int]:
    """A LoRA adapter of every linear layer, no larger than the 64 entries of decoupled memory: folder, rank, bytes."""
    backbone = Backbone.load(model)
    rank = largest_rank(backbone, memory_bytes(backbone, DECOUPLED_BUDGET, PAYLOAD_TOKENS, gated_tasks=0))
    size = save(attach(backbone, rank, SEED), work / LORA)
    return work / LORA, rank, size
