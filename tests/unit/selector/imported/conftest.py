"""A tiny Llama that memories are imported for."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from selector.backbone.model import Backbone
from tests.tiny_models import save_tiny_text_model

LAYERS, HEADS, KV_HEADS, SIZE, HIDDEN = 2, 6, 3, 8, 48


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def config(**tokens: int | None) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=SIZE,
            max_position_embeddings=256,
            **tokens,
        )

    return save_tiny_text_model(tmp_path_factory.mktemp("llama") / "model", config)


@pytest.fixture(scope="session")
def llama(llama_folder: Path) -> Backbone:
    return Backbone.load(llama_folder)
