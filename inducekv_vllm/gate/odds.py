"""Log-odds of a gate's tasks as evidence, and those that the means of a question's tokens have.

Shapes: K tasks that the gate was fitted to, R runs of clauses, S layers, F = J D features of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .clauses import chance

RANGE: Final = 8.0  # log-odds from -8 to 8 are evidence from 0 to 1: what is rarer than 1 in 3,000 is none at all
Odds = TypeVar("Odds", Tensor, npt.NDArray[np.float32])


def as_evidence(odds: Odds) -> Odds:
    """From 0 to 1."""
    return (odds / (2 * RANGE) + 0.5).clip(0, 1)


def of_best_run(odds: Tensor) -> Tensor:
    """[K], from log-odds [R, K]: of all of a question first, then of its runs."""
    if len(odds) == 1:
        return odds[0]
    return torch.maximum(odds[0], odds[1:].amax(dim=0) - chance(len(odds)))


@dataclass(frozen=True)
class MeanScores:
    """The part of a gate that is applied to means of a question's tokens, its text alone.

    Under tensor parallelism a rank has the features of its KV heads only; the sums over features are then added up over
    the ranks.
    """

    center: Tensor  # [S, F]
    scale: Tensor  # [S, F]
    directions: Tensor  # [K, S, F]
    offsets: Tensor  # [K]
    clause_ends: frozenset[int]  # the tokens with which a clause ends

    def evidence(self, means: Tensor, add_up: Callable[[Tensor], Tensor] = lambda sums: sums) -> Tensor:
        """[K], those of the run that has most, from the means [R, S, F] of a question's values.

        Args:
            add_up: the sum over ranks of [R, K].
        """
        standard = (means.to(self.center.dtype) - self.center) * self.scale  # [R, S, F]
        odds = add_up(torch.einsum("rsf,ksf->rk", standard, self.directions)) + self.offsets  # [R, K]
        return as_evidence(of_best_run(odds))
