"""Build a bundle by extraction alone: choose examples, extract their entries, keep the starting calibration.

Nothing is optimised; it is the baseline every selection has to beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.page_terms import Weighting

from ..backbone.extraction import extract, extract_keys
from ..backbone.model import Backbone
from ..data.examples import Example, entry_records
from ..runtime.checks import require_at_least, require_choice

Policy = Literal["random", "k-center"]

# Where the paper's calibration starts: softplus(phi_tau) = 0.07, sigmoid(phi_l) = 0.5.
INITIAL_TEMPERATURE = 0.07
INITIAL_VALUE_GATE = 0.5


@dataclass(frozen=True)
class BuildSettings:
    """What to build; raises `ConfigError` for values out of range."""

    budget: int  # at most this many entries
    payload_tokens: int = 8  # m
    policy: Policy = "random"
    weighting: Weighting = "sqrt"
    seed: int = 0
    batch_size: int = 8  # of extraction; affects speed and memory only

    def __post_init__(self) -> None:
        require_at_least(1, budget=self.budget, payload_tokens=self.payload_tokens, batch_size=self.batch_size)
        require_at_least(0, seed=self.seed)
        require_choice(Policy, policy=self.policy)
        require_choice(Weighting, weighting=self.weighting)


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
    recorded = asdict(settings)
    del recorded["batch_size"]
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
        recipe="build",
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


def pick(N: int, count: int, policy: Policy, rng: np.random.Generator, keys: Tensor | None) -> list[int]:
    """`count` of N rows, at most N, rising; those of the largest spread by `keys` [N, d] where k-center is wanted."""
    if policy == "random":
        return sorted(rng.choice(N, count, replace=False).tolist())
    assert keys is not None
    return sorted(k_center(keys, count, first=int(rng.integers(N))))


def k_center(keys: Tensor, count: int, first: int) -> list[int]:
    """Greedy farthest-first traversal: each next key is the one least similar to all chosen so far.

    Args:
        keys: [N, d], unit norm, so that the largest distance is the smallest inner product.
        count: how many to choose, at most N.
        first: where to begin.

    Returns:
        `count` distinct rows in the order chosen; of several equally far, the first.
    """
    matrix = keys.numpy()
    chosen = [first]
    nearest = matrix @ matrix[first]  # [N]: similarity to the nearest chosen key
    nearest[first] = np.inf
    while len(chosen) < count:
        farthest = int(nearest.argmin())
        chosen.append(farthest)
        nearest = np.maximum(nearest, matrix @ matrix[farthest])
        nearest[farthest] = np.inf
    return chosen
