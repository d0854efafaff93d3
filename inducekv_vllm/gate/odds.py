"""Log-odds of a gate's tasks as evidence, and those that the means of a question's tokens have.

Shapes: K tasks that the gate was fitted to, R runs of clauses of all questions, S layers, F = J D features of a token.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .clauses import CHANCE

RANGE: Final = 8.0  # log-odds from -8 to 8 are evidence from 0 to 1: what is rarer than 1 in 3,000 is none at all
Odds = TypeVar("Odds", Tensor, npt.NDArray[np.float32])


def as_evidence(odds: Odds) -> Odds:
    """From 0 to 1."""
    return (odds / (2 * RANGE) + 0.5).clip(0, 1)


def of_best_run(odds: Tensor) -> Tensor:
    """[K], from log-odds [R, K]: of all of a question first, then of its runs."""
    if len(odds) == 1:
        return odds[0]
    return torch.maximum(odds[0], odds[1:].amax(dim=0) - CHANCE * math.log(len(odds)))


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
        return as_evidence(of_best_run(self._odds(means, add_up)))

    def evidence_of_each(
        self,
        means: Tensor,
        counts: Sequence[int],
        add_up: Callable[[Tensor], Tensor],
        index: Callable[[list[int]], Tensor] = torch.tensor,
    ) -> Tensor:
        """[n, K], of n questions with so many runs each, one behind the other in `means`.

        Args:
            index: numbers as int64 where the means are.
        """
        odds = self._odds(means, add_up)
        firsts, lengths = index(list(accumulate(counts[:-1], initial=0))), index(list(counts))
        of_runs = odds.index_fill(0, firsts, -torch.inf)  # without that of all of a question
        best: Tensor = torch.segment_reduce(of_runs, "max", lengths=lengths, axis=0)  # [n, K]
        return as_evidence(torch.maximum(odds[firsts], best - CHANCE * lengths.log()[:, None]))

    def _odds(self, means: Tensor, add_up: Callable[[Tensor], Tensor]) -> Tensor:
        """[R, K]"""
        standard = (means.to(self.center.dtype) - self.center) * self.scale  # [R, S, F]
        return add_up(torch.einsum("rsf,ksf->rk", standard, self.directions)) + self.offsets
