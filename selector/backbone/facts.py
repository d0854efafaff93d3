"""Facts of the frozen model: how its prompts are read, without its files."""

from __future__ import annotations

from inducekv_vllm.backbone.placeholders import placeholder_ids
from inducekv_vllm.backbone.stored_facts import FactReader
from inducekv_vllm.backbone.turns import turn_marks
from inducekv_vllm.backbone.word_vectors import WordVectors

from .model import Backbone


def fact_reader(backbone: Backbone) -> FactReader:
    """As `FactReader.of`, for a model that is loaded."""
    embeddings = backbone.model.get_input_embeddings().weight.detach().cpu()  # [V, d]
    config = backbone.model.config
    return FactReader(
        tokenizer=backbone.tokenizer,
        vectors=WordVectors(backbone.tokenizer, embeddings),
        marks=turn_marks(backbone.processor),
        placeholders=placeholder_ids(config),
        model=backbone.fingerprint,
        context=getattr(config.get_text_config(decoder=True), "max_position_embeddings", None),
    )
