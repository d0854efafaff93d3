"""The model of about 80M parameters: the demo model's architecture, tokenizer and processor, wider, deeper, untrained.

Its answers mean nothing; its costs are those of any model of its shape.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlavaForConditionalGeneration, PreTrainedTokenizerFast, Qwen3Config

from benchmarks.demo.model import build_config, export
from server.demo import CHECKPOINT

SEED = 0


def save_80m(directory: Path, tokenizer_source: Path = CHECKPOINT) -> Path:
    """Writes the checkpoint (about 160 MB of float16) to `directory`, the same bytes every time."""
    config = build_config()
    text = config.text_config
    assert isinstance(text, Qwen3Config)
    text.hidden_size = 768
    text.intermediate_size = 2048
    text.num_hidden_layers = 12
    text.num_attention_heads = 12
    text.num_key_value_heads = 4
    text.head_dim = 64
    text.layer_types = ["full_attention"] * 12
    torch.manual_seed(SEED)
    model = LlavaForConditionalGeneration(config)
    return export(model, PreTrainedTokenizerFast.from_pretrained(tokenizer_source), directory)
