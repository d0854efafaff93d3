"""Build a bundle by extraction alone: choose examples, extract their entries, keep the initial calibration.

Nothing is optimised: this is the baseline that every recipe has to beat.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from inducekv_vllm.bundle import Bundle

from ..backbone.extraction import extract, extract_keys
from ..backbone.model import Backbone
from ..data.choice import pick
from ..data.examples import Example, entry_records
from .parametrization import INITIAL_TEMPERATURE, INITIAL_VALUE_GATE
from .settings import BUILD, BuildSettings


def build_bundle(
    backbone: Backbone, examples: Sequence[Example], settings: BuildSettings, *, progress: bool = False
) -> Bundle:
    """A bundle of at most `settings.budget` of the examples; the same settings and data give the same digest.

    Raises:
        TaskDataError: the model's processor refuses an example.
        BundleError: the model gives values that float16 cannot hold.
    """
    chosen = [examples[i] for i in choose(backbone, examples, settings, progress=progress)]
    entries = extract(
        backbone,
        chosen,
        settings.payload_tokens,
        batch_size=settings.batch_size,
        payload_dtype=torch.float16,
        progress=progress,
    )
    recorded = settings.model_dump(exclude={"batch_size"})
    return Bundle.create(
        retrieval_keys=entries.keys,
        payload_keys=entries.payload_keys,
        payload_values=entries.payload_values,
        temperature=INITIAL_TEMPERATURE,
        value_gates=torch.full((backbone.num_layers,), INITIAL_VALUE_GATE),
        layer_bias=torch.zeros(backbone.num_layers),
        backbone=backbone.fingerprint,
        budget=settings.budget,
        entries=entry_records(chosen),
        weighting=settings.weighting,
        recipe=BUILD,
        settings=recorded | {"candidates": len(examples)},
    )


def choose(
    backbone: Backbone, examples: Sequence[Example], settings: BuildSettings, *, progress: bool = False
) -> list[int]:
    """Which examples become entries, in the order of the data; all of them where the budget allows."""
    if len(examples) <= settings.budget:
        return list(range(len(examples)))
    keys = None
    if settings.policy == "k-center":
        keys = extract_keys(backbone, examples, batch_size=settings.batch_size, progress=progress)
    return pick(len(examples), settings.budget, settings.policy, np.random.default_rng(settings.seed), keys)
