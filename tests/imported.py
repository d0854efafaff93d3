"""Prefixes, soft prompts and cartridges for tiny models, and what transformers and PEFT make of them.

No code here is the product's: positions, rotations and caches are those of the libraries.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from peft import (
    CartridgeConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache

_ENCODER = {"encoder_hidden_size": 32}
ADAPTERS: dict[str, Callable[..., peft.PromptLearningConfig]] = {
    "prefix": PrefixTuningConfig,
    "projected-prefix": lambda **known: PrefixTuningConfig(prefix_projection=True, **_ENCODER, **known),
    "prompt": PromptTuningConfig,
    "p-tuning-mlp": lambda **known: PromptEncoderConfig(**_ENCODER, **known),
    "p-tuning-lstm": lambda **known: PromptEncoderConfig(encoder_reparameterization_type="LSTM", **_ENCODER, **known),
    "cartridge": CartridgeConfig,
}
OF_CACHE = ("prefix", "projected-prefix", "cartridge")
TOKENS = 7


def load_network(model: Path) -> Any:
    """A model as transformers loads it."""
    config = AutoConfig.from_pretrained(model)
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    return auto.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


def save_adapter(model: Path, name: str, folder: Path, *, tokens: int = TOKENS, seed: int = 0) -> Path:
    """A random adapter of the kind `name`, saved by PEFT."""
    torch.manual_seed(seed)
    config = ADAPTERS[name](task_type="CAUSAL_LM", num_virtual_tokens=tokens)
    adapted = get_peft_model(load_network(model), config)
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            parameter.data.normal_(0.0, 1.0)
    adapted.save_pretrained(folder)
    return folder


def save_cartridge(
    path: Path, layers: int, heads: int, size: int, *, tokens: int = TOKENS, frozen: int = 1, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """As `TrainableCache.save` of HazyResearch writes it; returns its keys and values [L, J, tokens, D]."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(layers, heads, tokens, size, generator=generator) for _ in range(2))
    content = {}
    for name, numbers in (("keys", keys), ("values", values)):
        parts = {"trainable": slice(frozen, None), "frozen": slice(0, frozen)}
        for part, place in parts.items():
            each = [nn.Parameter(layer[None, :, place].contiguous()) for layer in numbers]
            content[f"{part}_{name}"] = nn.ParameterList(each if part == "trainable" or frozen else [])
    torch.save(content, path)
    return keys, values


@torch.no_grad()
def logprobs(network: Any, inputs: dict[str, Tensor], answer: Sequence[int], **options: Any) -> Tensor:
    """Of the answer's tokens behind the prompt `inputs`, by one forward pass: [tokens] float32."""
    ids = torch.tensor([list(answer)])
    given = dict(inputs)
    for name in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"):
        if name in given:
            more = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}.get(name, torch.zeros_like(ids))
            given[name] = torch.cat([given[name], more], dim=1)
    logits = network(**given, **options).logits[0, -1 - len(answer) : -1]
    return logits.float().log_softmax(-1).gather(1, ids.T)[:, 0]


def behind_adapter(model: Path, folder: Path, inputs: dict[str, Tensor], answer: Sequence[int]) -> Tensor:
    """By PEFT's own model."""
    return logprobs(PeftModel.from_pretrained(load_network(model), folder).eval(), inputs, answer)


def behind_cache(model: Path, keys: Tensor, values: Tensor, inputs: dict[str, Tensor], answer: Sequence[int]) -> Tensor:
    """Behind p tokens in the cache, whose keys and values [L, J, p, D] are as in a request that goes on at p."""
    cache = DynamicCache()
    for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
        cache.update(key[None], value[None], layer)
    seen = torch.ones(1, keys.shape[2], dtype=torch.int64)
    known = {**inputs, "attention_mask": torch.cat([seen, inputs["attention_mask"]], dim=1)}
    return logprobs(load_network(model), known, answer, past_key_values=cache)


def behind_text(model: Path, ids: Sequence[int], inputs: dict[str, Tensor], answer: Sequence[int]) -> Tensor:
    """Behind these tokens, as part of the prompt."""
    first = torch.tensor([list(ids)])
    known = dict(inputs)
    for name in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"):
        if name in known:
            more = {"input_ids": first, "attention_mask": torch.ones_like(first)}.get(name, torch.zeros_like(first))
            known[name] = torch.cat([more, known[name]], dim=1)
    return logprobs(load_network(model), known, answer)
