"""The inner problem: fit the calibration phi to the current task (paper, Eq. inner_rewrite).

Adam is written out because its state carries over between outer iterations. Without weight decay it equals the paper's
AdamW; a test compares it with torch's.

Shapes: L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ..update.parametrization import INITIAL_TEMPERATURE, INITIAL_VALUE_GATE, temperature, value_gates

LEARNING_RATE: Final = 1e-2
BETAS: Final = (0.9, 0.999)
ADAM_EPSILON: Final = 1e-8
L2_PENALTY: Final = 1e-4  # eta


@dataclass(frozen=True)
class Calibration:
    """phi and the optimiser's state, which carries over from one outer iteration to the next."""

    phi: Tensor  # [1 + L] float64
    mean: Tensor  # [1 + L] float64: Adam's running mean of the gradient
    square: Tensor  # [1 + L] float64: and of its square
    steps: int  # taken so far

    @classmethod
    def initial(cls, num_layers: int) -> Calibration:
        """tau = 0.07 and gates of 0.5."""
        phi = torch.full(
            (1 + num_layers,), math.log(INITIAL_VALUE_GATE / (1 - INITIAL_VALUE_GATE)), dtype=torch.float64
        )
        phi[0] = math.log(math.expm1(INITIAL_TEMPERATURE))
        return cls(phi, torch.zeros_like(phi), torch.zeros_like(phi), 0)

    @property
    def temperature(self) -> Tensor:
        """tau: [] float64."""
        return temperature(self.phi)

    @property
    def value_gates(self) -> Tensor:
        """[L] float64."""
        return value_gates(self.phi)

    def stepped(self, gradient: Tensor) -> Calibration:
        """After one step of AdamW without decay along `gradient` [1 + L]."""
        steps = self.steps + 1
        mean = BETAS[0] * self.mean + (1 - BETAS[0]) * gradient
        square = BETAS[1] * self.square + (1 - BETAS[1]) * gradient**2
        corrected = square / (1 - BETAS[1] ** steps)
        phi = self.phi - LEARNING_RATE * (mean / (1 - BETAS[0] ** steps)) / (corrected.sqrt() + ADAM_EPSILON)
        return Calibration(phi, mean, square, steps)


def penalty(phi: Tensor) -> Tensor:
    """1e-4 |phi|^2 of `phi` [1 + L]: []."""
    return L2_PENALTY * phi.square().sum()


def fit(calibration: Calibration, loss: Callable[[Tensor, int], Tensor], steps: int) -> Calibration:
    """`steps` steps on loss + 1e-4 |phi|^2.

    Args:
        loss: of phi [1 + L] and the number of the step: [], any float type.
    """
    for step in range(steps):
        phi = leaf(calibration.phi)
        regularised = loss(phi, step).to(phi.dtype) + penalty(phi)
        (gradient,) = torch.autograd.grad(regularised, phi)
        calibration = calibration.stepped(gradient)
    return calibration


def leaf(tensor: Tensor) -> Tensor:
    """A copy that gradients can be taken with respect to."""
    return tensor.detach().clone().requires_grad_()
