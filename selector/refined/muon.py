"""Muon for many small matrices at once: momentum steps, orthogonalised matrix by matrix.

torch.optim.Muon takes one 2-D parameter at a time, where a memory has a matrix for every layer and entry, and
computes in bfloat16, which most CPUs only emulate.

Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024 (step and coefficients);
J. Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982 (step size).
"""

import math
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import Tensor

MOMENTUM: Final = 0.8
NEWTON_SCHULZ: Final = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS: Final = 5
ADAMW_RMS: Final = 0.2  # root mean square of AdamW's updates at a learning rate of 1 (Liu et al.)
SMALLEST_NORM: Final = 1e-7


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, decoupled weight decay. Parameters are float32, [..., r, c]: the last two axes are matrices.

    A matrix whose gradient is zero does not move: its momentum would point along an old direction at full step size.
    If r <= c, an element changes by about 0.2 lr in root mean square.
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float = MOMENTUM, weight_decay: float = 0.0
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state["momentum"] = torch.zeros_like(parameter)
                    _step(parameter, parameter.grad, state["momentum"], group)


def _step(values: Tensor, gradients: Tensor, average: Tensor, group: dict[str, Any]) -> None:
    """Update values and the gradients' average [..., r, c] in place."""
    moves = gradients.abs().amax(dim=(-2, -1), keepdim=True) > 0  # [..., 1, 1]
    new_average = average.lerp(gradients, 1 - group["momentum"])
    size = group["lr"] * ADAMW_RMS * math.sqrt(max(values.shape[-2:]))
    shrunk = values * (1 - group["lr"] * group["weight_decay"])
    moved = shrunk - size * orthogonalized(gradients.lerp(new_average, group["momentum"]))
    values.copy_(torch.where(moves, moved, values))
    average.copy_(torch.where(moves, new_average, average))


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
