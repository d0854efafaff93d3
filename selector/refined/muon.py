"""Muon for many small matrices at once: steps along the momentum, each matrix with its singular values made equal.

torch.optim.Muon takes one matrix at a time, and a memory has one for every layer, entry and head.

Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, for the step and the
coefficients; J. Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982, for its size.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

MOMENTUM: Final = 0.8
NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS: Final = 5
RMS_OF_ADAMW: Final = 0.2  # of the changes that AdamW makes at a rate of 1, as found by Liu et al.
SMALLEST_NORM: Final = 1e-7


def muon_step(values: Tensor, gradients: Tensor, momenta: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Values and momenta after one step, with Nesterov's momentum and without decay.

    A matrix whose gradient is zero stays as it is: a direction does not say how long ago it was asked for.

    Args:
        values, gradients, momenta: [..., r, c] float32.
        rate: learning rate; an element changes by about 0.2 times that much, root mean square, where r <= c.
    """
    after = momenta.lerp(gradients, 1 - MOMENTUM)
    size = rate * RMS_OF_ADAMW * math.sqrt(max(values.shape[-2:]))
    moved = values - size * orthogonalized(gradients.lerp(after, MOMENTUM))
    asked = gradients.abs().amax(dim=(-2, -1), keepdim=True) > 0  # [..., 1, 1]
    return torch.where(asked, moved, values), torch.where(asked, after, momenta)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Each U S V^T with all singular values brought to between 0.7 and 1.2; those near zero stay there.

    Args:
        matrices: [..., r, c] float32.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalized(matrices.mT).mT
    a, b, c = NEWTON_SCHULZ
    norms: Tensor = torch.linalg.matrix_norm(matrices, keepdim=True)  # [..., 1, 1]
    found = matrices / norms.clamp(min=SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = found @ found.mT  # [..., r, r]
        found = found * a + (gram * b + gram @ gram * c) @ found
    return found
