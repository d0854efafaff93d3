"""A tiny Llama that memories are imported for."""

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from selector.backbone.model import Backbone
from tests.tiny_models import save_tiny_text_model

LAYERS, HEADS, KV_HEADS, SIZE, HIDDEN = 2, 6, 3, 8, 48


def small_llama(folder: Path, **settings: Any) -> Path:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": LAYERS, "head_dim": SIZE}
    sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    return save_tiny_text_model(folder, lambda **tokens: LlamaConfig(**sizes, **settings, **tokens))


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama(tmp_path_factory.mktemp("llama") / "model", max_position_embeddings=256)


@pytest.fixture(scope="session")
def llama(llama_folder: Path) -> Backbone:
    return Backbone.load(llama_folder)
