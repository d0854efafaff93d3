"""Muon for many small matrices at once: momentum steps, orthogonalised matrix by matrix.

torch.optim.Muon takes one 2-D parameter at a time; a memory has a matrix for every layer and entry.

Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (step and coefficients);
J. Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982 (step size).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

MOMENTUM: Final = 0.8
NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS: Final = 5
ADAMW_RMS: Final = 0.2  # root mean square of AdamW's updates at a learning rate of 1 (Liu et al.)
SMALLEST_NORM: Final = 1e-7


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, no weight decay. Parameters are float32, [..., r, c]; the last two axes are the matrices.

    A matrix whose gradient is zero does not move: its momentum would point along an old direction at full step size.
    If r <= c, an element changes by about 0.2 lr in root mean square.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(list(parameters), {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    _step(parameter, parameter.grad, state["momentum"], group["lr"])


def _step(values: Tensor, gradients: Tensor, momentum: Tensor, lr: float) -> None:
    """Update values and momentum [..., r, c] in place."""
    moves = gradients.abs().amax(dim=(-2, -1), keepdim=True) > 0  # [..., 1, 1]
    new_momentum = momentum.lerp(gradients, 1 - MOMENTUM)
    size = lr * ADAMW_RMS * math.sqrt(max(values.shape[-2:]))
    moved = values - size * orthogonalized(gradients.lerp(new_momentum, MOMENTUM))
    values.copy_(torch.where(moves, moved, values))
    momentum.copy_(torch.where(moves, new_momentum, momentum))


def orthogonalized(matrices: Tensor) -> Tensor:
    """Each U S V^T with its singular values brought to between 0.7 and 1.2; those near zero stay there.

    Args:
        matrices: [..., r, c] float32.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalized(matrices.mT).mT
    a, b, c = NEWTON_SCHULZ
    norms: Tensor = torch.linalg.matrix_norm(matrices, keepdim=True)  # [..., 1, 1]
    x = matrices / norms.clamp(min=SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT  # [..., r, r]
        x = x * a + (gram * b + gram @ gram * c) @ x
    return x
