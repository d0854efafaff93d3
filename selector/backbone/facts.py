"""Facts of the frozen model: how its prompts are read, without its files."""

from __future__ import annotations

from inducekv_vllm.backbone.stored_facts import FactReader
from inducekv_vllm.backbone.word_vectors import WordVectors

from .model import Backbone


def fact_reader(backbone: Backbone) -> FactReader:
    """As `FactReader.of`, for a model that is loaded."""
    embeddings = backbone.model.get_input_embeddings().weight.detach().cpu()  # [V, d]
    vectors = WordVectors(backbone.tokenizer, embeddings)
    return FactReader.made(backbone.model.config, backbone.processor, vectors, backbone.fingerprint)
