"""Bundles of keys and values without calibration: a request sees each token like one of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from inducekv_vllm.backbone.checkpoints import load_config
from inducekv_vllm.bundle import Bundle, EntryRecord, PayloadDtype
from inducekv_vllm.errors import BundleError

from ..backbone.model import Backbone
from ..update.settings import IMPORTED
from .prefix import Prefix, require_distances
from .source import Source


def import_source(backbone: Backbone, source: Source, *, task: str, dtype: PayloadDtype | None = None) -> Bundle:
    """Merged memory of one entry of weight 1, without calibration or gate.

    Args:
        task: the name of the entry and of its task.
        dtype: of the keys and values (default: that of the checkpoint, so that they are as exact as a cache of them).

    Raises:
        UnsupportedModel: the memory would not be exact with this model.
        BundleError, TaskDataError: the source does not fit the model, is damaged, or has numbers beyond `dtype`.
    """
    require_distances(backbone)
    prefix, dtype = source.prefix(backbone), dtype or _dtype_of(backbone)
    _check_range(prefix, dtype)
    return untrained_bundle(
        backbone,
        prefix.keys[:, None],
        prefix.values[:, None],
        [EntryRecord(id=task, task=task, source_digest=source.digest)],
        recipe=IMPORTED,
        settings=source.settings,
        payload_dtype=dtype,
    )


def untrained_bundle(
    backbone: Backbone, keys: Tensor, values: Tensor, entries: Sequence[EntryRecord], **others: Any
) -> Bundle:
    """Merged memory of B entries of weight 1, without calibration.

    Args:
        keys: [L, B, J, m, D], float.
        values: [L, B, J, m, V], float.
        entries: B records.
        others: what else `Bundle.create` takes.

    Raises:
        BundleError: as `Bundle.create` does.
    """
    L, B, d = backbone.num_layers, len(entries), backbone.hidden_size
    return Bundle.create(
        retrieval_keys=torch.full((B, d), d**-0.5),  # nothing is chosen by them
        payload_keys=keys,
        payload_values=values,
        temperature=1.0,
        value_gates=torch.ones(L),
        layer_bias=torch.zeros(L),
        backbone=backbone.fingerprint,
        budget=B,
        entries=tuple(entries),
        weighting="uniform",
        **others,
    )


def _dtype_of(backbone: Backbone) -> PayloadDtype:
    """float16 for a checkpoint of 16 bits: a cache of bfloat16 has fewer digits."""
    config, _ = load_config(backbone.model.config.name_or_path)
    dtype = config.dtype or config.get_text_config(decoder=True).dtype
    return "float32" if dtype is torch.float32 else "float16"


def _check_range(prefix: Prefix, dtype: PayloadDtype) -> None:
    limit = torch.finfo(getattr(torch, dtype)).max
    for name, tensor in (("keys", prefix.keys), ("values", prefix.values)):
        if not (largest := float(tensor.abs().max())) <= limit:
            raise BundleError(
                f"the {name} reach {largest:.4g}, and a bundle of {dtype} holds numbers up to {limit:.4g}"
            )
