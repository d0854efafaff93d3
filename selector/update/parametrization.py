"""How the calibration's temperature and value gates depend on unconstrained parameters phi (paper, Eq. inner_rewrite).

    tau = softplus(phi_tau) > 0        gate_l = sigmoid(phi_l) in (0, 1)

An infinite phi is not fitted: no step changes it. It stands for a gate of 1, or for a temperature at which all entries
have the same weight (the paper's ablations "w/o layerwise value gates" and "w/o retrieval-weighted induction").

Shapes: L layers.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# Where calibration starts (paper, "Implementation Details").
INITIAL_TEMPERATURE: Final = 0.07
INITIAL_VALUE_GATE: Final = 0.5
UNIFORM_TEMPERATURE: Final = 1e30  # finite, as a bundle requires; inner products divided by it are equal


def temperature(phi: Tensor) -> Tensor:
    """tau of `phi` [1 + L]: []."""
    return torch.nn.functional.softplus(phi[0]).clamp(max=UNIFORM_TEMPERATURE)


def value_gates(phi: Tensor) -> Tensor:
    """The gates of `phi` [1 + L]: [L]."""
    return phi[1:].sigmoid()
