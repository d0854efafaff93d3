"""A model of any geometry: the demo's LLaVA wrapper, tower, tokenizer and processor around Qwen3's layers.

Its costs are the language model's; its answers mean nothing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    LlavaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from benchmarks.demo.model import VOCABULARY, build_config, export, write_settings
from benchmarks.geometries import Geometry
from inducekv_vllm.backbone.checkpoints import kind_of
from selector.backbone.model import Backbone
from server.demo import CHECKPOINT

MODEL_SEED = 0


def config_of(geometry: Geometry) -> LlavaConfig:
    config = build_config()
    text = config.text_config
    assert isinstance(text, Qwen3Config)
    text.vocab_size = geometry.vocabulary
    text.hidden_size = geometry.hidden_size
    text.intermediate_size = geometry.intermediate_size
    text.num_hidden_layers = geometry.layers
    text.num_attention_heads = geometry.heads
    text.num_key_value_heads = geometry.kv_heads
    text.head_dim = geometry.head_size
    text.layer_types = ["full_attention"] * geometry.layers
    return config


def make_model(geometry: Geometry, dtype: str, directory: Path) -> Path:
    """Write a checkpoint with random weights to `directory`, the same bytes every time on one kind of device.

    Its vocabulary is the demo's.
    """
    torch.manual_seed(MODEL_SEED)
    config = config_of(replace(geometry, vocabulary=VOCABULARY))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype))
    export(model, PreTrainedTokenizerFast.from_pretrained(CHECKPOINT), directory)
    del model
    torch.cuda.empty_cache()
    return directory


def make_folder(geometry: Geometry, dtype: str, directory: Path) -> Path:
    """Write a checkpoint without weights, for `--load-format dummy`."""
    directory.mkdir()
    write_settings(config_of(geometry), PreTrainedTokenizerFast.from_pretrained(CHECKPOINT), directory, dtype)
    fill_vocabulary(directory / "tokenizer.json", geometry.vocabulary)
    return directory


def fill_vocabulary(path: Path, size: int) -> None:
    """Give every id below `size` a token, which no text is cut into: a server has to show what the model generates."""
    tokenizer = json.loads(path.read_text())
    pieces = tokenizer["model"]["vocab"]
    for number in range(len(pieces), size):
        pieces[f"Ġ{number:09}"] = number
    assert len(pieces) == size, f"{path} has {len(pieces)} tokens, the model {size}"
    path.write_text(json.dumps(tokenizer))


def without_weights(model: Path) -> Backbone:
    """The model of a folder on the meta device: its modules and sizes, and no numbers."""
    config = AutoConfig.from_pretrained(model)
    text = kind_of(config, model) == "text"
    with torch.device("meta"):
        network = (AutoModelForCausalLM if text else AutoModelForImageTextToText).from_config(config)
    return Backbone.of(network, (AutoTokenizer if text else AutoProcessor).from_pretrained(model))
