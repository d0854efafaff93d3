"""Facts of the frozen model: how its prompts are read, without its files."""

from __future__ import annotations

from inducekv_vllm.backbone.fact_reader import FactReader

from .model import Backbone


def fact_reader(backbone: Backbone) -> FactReader:
    """As `FactReader.of`, for a model that is loaded."""
    return FactReader.made(backbone.model.config, backbone.processor, backbone.fingerprint)
