"""The inner problem: fit the calibration phi to the current task (paper, Eq. inner_rewrite).

Shapes: L layers.
"""

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ..update.parametrization import INITIAL_TEMPERATURE, INITIAL_VALUE_GATE, temperature, value_gates

LEARNING_RATE: Final = 1e-2
BETAS: Final = (0.9, 0.999)
L2_PENALTY: Final = 1e-4  # eta


class Calibration:
    """phi, and the state of its AdamW, which carries over from one outer iteration to the next."""

    def __init__(self, num_layers: int) -> None:
        """tau = 0.07 and gates of 0.5."""
        gate = math.log(INITIAL_VALUE_GATE / (1 - INITIAL_VALUE_GATE))
        phi = torch.full((1 + num_layers,), gate, dtype=torch.float64)
        phi[0] = math.log(math.expm1(INITIAL_TEMPERATURE))
        self._phi = phi.requires_grad_()
        self._optimizer = torch.optim.AdamW([self._phi], lr=LEARNING_RATE, betas=BETAS, weight_decay=0)

    @property
    def phi(self) -> Tensor:
        """[1 + L] float64."""
        return self._phi.detach().clone()

    @property
    def temperature(self) -> Tensor:
        """tau: [] float64."""
        return temperature(self.phi)

    @property
    def value_gates(self) -> Tensor:
        """[L] float64."""
        return value_gates(self.phi)

    def fit(self, loss: Callable[[Tensor, int], Tensor], steps: int) -> None:
        """Take `steps` steps on loss + 1e-4 |phi|^2.

        Args:
            loss: of phi [1 + L] and the number of the step: [], any float type.
        """
        for step in range(steps):
            regularised = loss(self._phi, step).to(self._phi.dtype) + L2_PENALTY * self._phi.square().sum()
            (self._phi.grad,) = torch.autograd.grad(regularised, self._phi)
            self._optimizer.step()


def leaf(tensor: Tensor) -> Tensor:
    """A copy that gradients can be taken with respect to."""
    return tensor.detach().clone().requires_grad_()
