"""Log-odds of a gate's tasks as evidence, and those that the mean of a question's tokens has.

Shapes: K tasks that the gate was fitted to, S layers, F = J D features of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

RANGE: Final = 8.0  # log-odds from -8 to 8 are evidence from 0 to 1: what is rarer than 1 in 3,000 is none at all
Odds = TypeVar("Odds", Tensor, npt.NDArray[np.float32])


def as_evidence(odds: Odds) -> Odds:
    """From 0 to 1."""
    return (odds / (2 * RANGE) + 0.5).clip(0, 1)


@dataclass(frozen=True)
class MeanScores:
    """The part of a gate that is applied to the mean of a question's tokens, its text alone.

    Under tensor parallelism a rank has the features of its KV heads only; the sums over features are then added up over
    the ranks.
    """

    center: Tensor  # [S, F]
    scale: Tensor  # [S, F]
    directions: Tensor  # [K, S, F]
    offsets: Tensor  # [K]

    def evidence(self, mean: Tensor, add_up: Callable[[Tensor], Tensor] = lambda sums: sums) -> Tensor:
        """[K], from the mean [S, F] of a question's values.

        Args:
            add_up: the sum over ranks of [K].
        """
        standard = (mean.to(self.center.dtype) - self.center) * self.scale  # [S, F]
        return as_evidence(add_up(torch.einsum("sf,ksf->k", standard, self.directions)) + self.offsets)
