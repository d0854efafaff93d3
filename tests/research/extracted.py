"""Bundles as the model gives their entries, without any training."""

from collections.abc import Sequence

import torch

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.retrieval.entry_terms import MergedWeighting
from selector.backbone.extraction import extract
from selector.backbone.model import Backbone
from selector.data.examples import Example, entry_records
from selector.update.parametrization import INITIAL_TEMPERATURE, INITIAL_VALUE_GATE


def extracted_bundle(
    backbone: Backbone, examples: Sequence[Example], payload_tokens: int = 8, weighting: MergedWeighting = "sqrt"
) -> Bundle:
    entries = extract(backbone, examples, payload_tokens, payload_dtype=torch.float16)
    return Bundle.create(
        retrieval_keys=entries.keys,
        payload_keys=entries.payload_keys,
        payload_values=entries.payload_values,
        temperature=INITIAL_TEMPERATURE,
        value_gates=torch.full((backbone.num_layers,), INITIAL_VALUE_GATE),
        layer_bias=torch.zeros(backbone.num_layers),
        backbone=backbone.fingerprint,
        budget=len(examples),
        entries=entry_records(examples),
        weighting=weighting,
        recipe="build",
        settings={},
    )
