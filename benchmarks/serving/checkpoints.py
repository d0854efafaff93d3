"""A checkpoint of any geometry: the demo model's LLaVA wrapper, tower, tokenizer and processor around a language model.

Qwen3's layers compute every geometry. Its costs are the language model's; its answers mean nothing.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, PreTrainedTokenizerFast, Qwen3Config

from benchmarks.demo.model import build_config, export
from benchmarks.geometries import Geometry
from server.demo import CHECKPOINT

SEED = 0


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


def save(geometry: Geometry, directory: Path) -> Path:
    """Write a checkpoint with random weights to `directory`, the same bytes every time."""
    torch.manual_seed(SEED)
    model = LlavaForConditionalGeneration(config_of(geometry))
    return export(model, PreTrainedTokenizerFast.from_pretrained(CHECKPOINT), directory)
