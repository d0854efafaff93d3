"""A bundle of one entry: the keys and values of p tokens, each of which every request sees like one of its own."""

from __future__ import annotations

from typing import Any

import torch

from inducekv_vllm.bundle import Bundle, EntryRecord, PayloadDtype
from inducekv_vllm.errors import BundleError

from ..backbone.model import Backbone
from ..update.settings import IMPORTED
from .prefix import Prefix


def bundle_of(
    backbone: Backbone,
    prefix: Prefix,
    *,
    task: str,
    source_digest: str,
    settings: dict[str, Any],
    dtype: PayloadDtype = "float16",
) -> Bundle:
    """Merged memory of weight 1, without calibration or gate.

    Raises:
        BundleError: a number is not finite, or beyond what `dtype` holds.
    """
    for name, tensor in (("keys", prefix.keys), ("values", prefix.values)):
        largest, limit = float(tensor.abs().max()), torch.finfo(getattr(torch, dtype)).max
        if not largest <= limit:
            raise BundleError(
                f"the {name} reach {largest:.4g}, and a bundle of {dtype} holds numbers up to {limit:.4g}"
            )
    L, d = backbone.num_layers, backbone.hidden_size
    return Bundle.create(
        retrieval_keys=torch.full((1, d), d**-0.5),  # there is nothing to choose from
        payload_keys=prefix.keys[:, None],
        payload_values=prefix.values[:, None],
        temperature=1.0,
        value_gates=torch.ones(L),
        layer_bias=torch.zeros(L),
        backbone=backbone.fingerprint,
        budget=1,
        entries=(EntryRecord(id=task, task=task, source_digest=source_digest),),
        weighting="uniform",
        recipe=IMPORTED,
        settings=settings,
        payload_dtype=dtype,
    )
