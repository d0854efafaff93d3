"""Random directions, and a backbone in float64: what finite differences are compared on."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selector.backbone.model import Backbone


def unit_vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random directions, along the last axis."""
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(*shape, generator=generator, dtype=dtype), dim=-1)


@functools.cache
def in_float64(model: Path) -> Backbone:
    """For finite differences: transformers' RMS norms round to float32 whatever the model's type, and here do not."""
    backbone = Backbone.load(model, dtype=torch.float64)
    norms = [module for module in backbone.model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert norms
    for norm in norms:
        norm.forward = functools.partial(_norm, norm)
    return backbone


def _norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * x * (x.square().mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()
