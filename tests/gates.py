"""Relevance gates for tests: fits that are small enough, and bundles of random entries behind a gate."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from inducekv_vllm.bundle import Bundle, Gate
from selector.backbone.model import Backbone
from selector.data.examples import Example, entry_records
from tests.bundles import random_bundle

FITTING_SET = {"OWN": 10, "TEXTS": 20, "BASE": 10, "REQUESTS": 40, "NEAR_MISSES": 5, "NOISE": 10}
TRAINING = {"EPOCHS": 6}
CLASSIFIERS = {"STEPS": 12}


@contextmanager
def small_fits() -> Iterator[None]:
    """Inside, a gate is fitted to few questions of no task, in few steps."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple("selector.gate.fitting_set", **FITTING_SET))
        stack.enter_context(mock.patch.multiple("selector.gate.training", **TRAINING))
        stack.enter_context(mock.patch.multiple("selector.gate.classifiers", **CLASSIFIERS))
        yield


def bundle_behind(gate: Gate, backbone: Backbone, examples: Sequence[Example], **changes: Any) -> Bundle:
    """Random entries of these examples; `changes` replace arguments of `Bundle.create`."""
    fingerprint, B = backbone.fingerprint, len(examples)
    shape = (fingerprint.num_layers, B, fingerprint.num_kv_heads, 2, fingerprint.head_dim)
    arguments: dict[str, Any] = {
        "retrieval_keys": torch.nn.functional.normalize(torch.randn(B, fingerprint.hidden_size), dim=1),
        "payload_keys": torch.randn(shape),
        "payload_values": torch.randn(shape),
        "value_gates": torch.full((fingerprint.num_layers,), 0.5),
        "layer_bias": torch.zeros(fingerprint.num_layers),
        "backbone": fingerprint,
        "entries": entry_records(examples),
        "weighting": "prior",
        "recipe": "refined",
        "gate": gate,
    }
    return random_bundle(B, 2, **(arguments | changes))
