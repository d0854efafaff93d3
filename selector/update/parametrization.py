"""How the calibration's temperature and value gates depend on unconstrained parameters phi (paper, Eq. inner_rewrite).

    tau = softplus(phi_tau) > 0        gate_l = sigmoid(phi_l) in (0, 1)

Shapes: L layers.
"""

from typing import Final

import torch
from torch import Tensor

# Where calibration starts (paper, "Implementation Details").
INITIAL_TEMPERATURE: Final = 0.07
INITIAL_VALUE_GATE: Final = 0.5


def temperature(phi: Tensor) -> Tensor:
    """tau of `phi` [1 + L]: []."""
    return torch.nn.functional.softplus(phi[0])


def value_gates(phi: Tensor) -> Tensor:
    """The gates of `phi` [1 + L]: [L]."""
    return phi[1:].sigmoid()
