"""The sizes of a model that its configuration states, and what memories of these sizes take.

Shapes: B entries, m payload tokens, L layers, J KV heads, D head size, V size of a head's values, d hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from inducekv_vllm.backbone.footprint import FLOAT16_BYTES, TEXT_CONFIG_KEYS, footprint_bytes, size
from inducekv_vllm.backbone.memory_layers import layer_kinds, memory_heads, memory_layers
from inducekv_vllm.errors import UnsupportedModel

PAPER_BUDGETS = (64, 128, 256, 512)


@dataclass(frozen=True)
class TextGeometry:
    """The sizes of a language model that determine the size of a memory entry."""

    num_layers: int  # L, with attention
    num_kv_heads: int  # J
    head_dim: int  # D
    hidden_size: int  # d
    value_dim: int | None = None  # V; None: D
    # Of latent attention (MLA): with the keys and values of each head, which the paper's formula counts.
    per_head: TextGeometry | None = None


@dataclass(frozen=True)
class PlanRow:
    """The footprint of one budget: `tokens` = B m extra KV tokens a layer, `bytes` as `footprint_bytes` counts."""

    budget: int
    tokens: int
    bytes: int

    @property
    def mebibytes(self) -> float:
        return self.bytes / 2**20


def plan(
    geometry: TextGeometry,
    payload_tokens: int = 8,
    budgets: Iterable[int] = PAPER_BUDGETS,
    payload_bytes: int = FLOAT16_BYTES,
) -> list[PlanRow]:
    """Compute the footprint of each budget, as in the paper's system-overhead table."""
    g = geometry
    sizes = (g.hidden_size, g.num_layers, g.num_kv_heads, payload_tokens, g.head_dim, g.value_dim, payload_bytes)
    return [PlanRow(budget=B, tokens=B * payload_tokens, bytes=footprint_bytes(B, *sizes)) for B in budgets]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a Hugging Face `config.json`, or all of it if nothing is nested.

    A file may omit values that equal a default of its configuration class (LLaVA 1.5 omits most sizes). If transformers
    has the class, it fills them in.
    """
    from transformers import CONFIG_MAPPING  # takes seconds, and most users of this module do not need it

    if config.get("model_type") in CONFIG_MAPPING:
        try:
            complete = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UnsupportedModel(f"transformers refuses the {config['model_type']} configuration: {error}") from error
        text = complete.get_text_config(decoder=True)
        found = {**text.to_dict(), "layer_types": layer_kinds(text)}  # which some classes compute
        if text.is_heterogeneous:  # what is the same in all layers is not told apart from what is not
            heads, layers = memory_heads(text), memory_layers(text)
            found |= {"num_attention_heads": heads.num_heads, "num_key_value_heads": heads.num_kv_heads}
            found |= {"head_dim": heads.head_dim, "memory_layers": len(layers)}
        return found
    for key in TEXT_CONFIG_KEYS:
        if isinstance(config.get(key), Mapping):
            return dict(config[key])
    return config


def text_geometry(config: Mapping[str, Any]) -> TextGeometry:
    """Read the geometry from a parsed `config.json`.

    Raises:
        UnsupportedModel: a size is missing or not a positive whole number, or differs between layers. Some wrapper
            configurations rely on defaults in remote code (DeepSeek-VL2 base does); these are not guessed.
    """
    text = text_config(config)
    hidden_size = size(text, "hidden_size")
    heads = size(text, "num_attention_heads")
    num_kv_heads = size(text, "num_key_value_heads") if text.get("num_key_value_heads") else heads
    size(text, "num_hidden_layers")
    num_layers = text.get("memory_layers") or len(memory_layers(SimpleNamespace(**{**text, "is_heterogeneous": False})))
    if text.get("kv_lora_rank"):
        latent, V = size(text, "kv_lora_rank"), size(text, "v_head_dim")
        per_head = TextGeometry(num_layers, num_kv_heads, V, hidden_size)
        D = latent + size(text, "qk_rope_head_dim")
        return TextGeometry(num_layers, 1, D, hidden_size, value_dim=latent, per_head=per_head)
    head_dim = size(text, "head_dim") if text.get("head_dim") else hidden_size // heads
    return TextGeometry(num_layers, num_kv_heads, head_dim, hidden_size)


def read_config(path: Path) -> dict[str, Any]:
    """Parse a `config.json`.

    Raises:
        UnsupportedModel: the file is missing, unreadable or not a JSON object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModel(f"{path}: cannot read the model configuration: {error.strerror}") from error
    except ValueError as error:
        raise UnsupportedModel(f"{path}: the model configuration is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModel(
            f"{path}: expected a JSON object with a model configuration, found {type(config).__name__}"
        )
    return config
