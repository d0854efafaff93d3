"""A LoRA adapter on a backbone: attached, sized, kept on disk (peft's own format, float16)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import nn

from benchmarks.fit import Fit
from inducekv_vllm.backbone.footprint import FLOAT16_BYTES, footprint_bytes, prototypes_of
from inducekv_vllm.errors import ConfigError
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.backbone.token_values import layers_of_gate
from selector.data.examples import Example
from selector.refined.settings import usual_precision
from selector.runtime.files import replace_file

RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM's --max-lora-rank takes
Modules = Literal["all", "attention", "o_proj", "mlp"]
# The last parts of the names of a decoder layer's linear layers; () for all of them.
SUFFIXES: Final[dict[Modules, tuple[str, ...]]] = {
    "all": (),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "o_proj": ("o_proj",),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def memory_bytes(backbone: Backbone, budget: int, payload_tokens: int, gated_tasks: int) -> int:
    """Of a bundle's tensors: its entries (paper, Eq. bytes_per_entry), and the gate of the refined recipe."""
    d, L = backbone.hidden_size, backbone.num_layers
    D, V = backbone.head_dim, backbone.value_dim
    entries = footprint_bytes(budget, d, L, backbone.num_kv_heads, payload_tokens, D, V)
    features, layers = backbone.num_kv_heads * V, len(layers_of_gate(backbone))
    return entries + gate_bytes(gated_tasks, features, layers)


def gate_bytes(num_tasks: int, features: int, layers: int = 2) -> int:
    """Of a relevance gate: prototypes [S, P, F] in float16; center, scale, floors and the rule in float32.

    Args:
        num_tasks: C; 0 for no gate.
        features: F.
        layers: S.
    """
    if num_tasks == 0:
        return 0
    H = layers * prototypes_of(num_tasks)
    numbers = 2 * layers * features + H + num_tasks * (H + 1)  # center and scale, floors, weights and thresholds
    return FLOAT16_BYTES * H * features + 4 * numbers


def linear_layers(backbone: Backbone, modules: Modules = "all") -> dict[str, nn.Linear]:
    """The linear layers inside the language model's decoder layers that `modules` names, by their full names."""
    attention = {id(module) for module in backbone.attention_layers()}
    names = {module: name for name, module in backbone.model.named_modules()}
    layers = tuple(name.removesuffix("self_attn") for module, name in names.items() if id(module) in attention)
    inside = {name: m for m, name in names.items() if isinstance(m, nn.Linear) and name.startswith(layers)}
    wanted = SUFFIXES[modules]
    return {name: layer for name, layer in inside.items() if not wanted or name.endswith(wanted)}


def largest_rank(backbone: Backbone, allowed_bytes: int, modules: Modules = "all") -> int:
    """The largest rank whose float16 [rank, in] and [out, rank] fit. Raises ConfigError: not even rank 1 does."""
    layers = linear_layers(backbone, modules).values()
    per_rank = sum(FLOAT16_BYTES * (layer.in_features + layer.out_features) for layer in layers)
    if per_rank > allowed_bytes:
        raise ConfigError(f"a LoRA of rank 1 takes {per_rank} bytes, the budget allows {allowed_bytes}")
    return allowed_bytes // per_rank


def served_rank(rank: int, what: str) -> int:
    """The least `--max-lora-rank` that takes this rank. Raises ConfigError, beginning with `what`: vLLM has none."""
    if rank > RANKS[-1]:
        raise ConfigError(f"{what} has rank {rank}, vLLM serves {RANKS[-1]} at most")
    return min(each for each in RANKS if each >= rank)


def attach(backbone: Backbone, rank: int, seed: int, modules: Modules = "all") -> Any:
    """A new adapter, which changes nothing yet, in the model's own layers: the backbone runs with it from now on."""
    torch.manual_seed(seed)
    targets = list(linear_layers(backbone, modules))
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=targets)
    return get_peft_model(backbone.model, config)


def attached_fit(backbone: Backbone, rank: int, examples: Sequence[Example]) -> tuple[Any, Fit]:
    """A new adapter of all linear layers, and its training in the precision of memory's, in batches of 4."""
    adapted = attach(backbone, rank, seed=0)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    autocast = usual_precision() == "bfloat16"
    return adapted, Fit(Scorer(backbone), parameters, examples, [], batch_size=4, seed=(0, 0), autocast=autocast)


def reattach(backbone: Backbone, folder: Path) -> Any:
    """A stored adapter, to be trained on, in float32."""
    return PeftModel.from_pretrained(backbone.model, str(folder), is_trainable=True)


def save(adapted: Any, folder: Path) -> int:
    """Writes the adapter as peft does, its matrices in float16; returns their bytes.

    Those of a model on the meta device, which has no numbers, are random.
    """
    folder.mkdir()
    adapted.peft_config["default"].save_pretrained(str(folder))
    matrices = get_peft_model_state_dict(adapted).items()
    numbers = {name: 0.01 * torch.randn(t.shape) if t.is_meta else t.detach() for name, t in matrices}
    tensors = {name: t.half().contiguous() for name, t in numbers.items()}
    replace_file(folder / "adapter_model.safetensors", safetensors.torch.save(tensors, metadata={"format": "pt"}))
    return sum(tensor.nbytes for tensor in tensors.values())
