"""What the selection minimises: NLL of the current task and of the anchors under weighted candidates.

Shapes: N candidates, n examples of a batch, L layers.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from inducekv_vllm.retrieval.entry_terms import Weighting

from ..backbone.injection import TensorMemory
from ..backbone.scoring import Questions, Scorer, batch_rows
from ..update.parametrization import temperature, value_gates
from .candidate_pool import CandidatePool


@dataclass(frozen=True)
class Objective:
    """L_cur and L_anc of weights w and calibration phi, on batches that a seed and a number determine."""

    scorer: Scorer
    pool: CandidatePool
    current: Questions
    anchors: Questions
    budget: int  # B
    weighting: Weighting
    batch_size: int
    seed: int

    def current_loss(self, weights: Tensor, phi: Tensor, batch: tuple[int, ...]) -> Tensor:
        """Mean NLL of the current task's batch number `batch` under w [N] and phi [1 + L] float64: []."""
        return self._loss(self.current, weights, phi, (0, *batch))

    def anchor_loss(self, weights: Tensor, phi: Tensor, batch: tuple[int, ...]) -> Tensor:
        """The same for the anchors; there must be some."""
        return self._loss(self.anchors, weights, phi, (1, *batch))

    def memory(self, phi: Tensor) -> TensorMemory:
        """All candidates as one memory with the calibration `phi`."""
        pool = self.pool
        num_layers = pool.payload_keys.shape[0]
        return TensorMemory(
            retrieval_keys=pool.keys,
            payload_keys=pool.payload_keys,
            payload_values=pool.payload_values,
            temperature=temperature(phi).to(pool.keys),
            value_gates=value_gates(phi).to(pool.keys),
            layer_bias=torch.zeros(num_layers, dtype=pool.keys.dtype),
            weighting=self.weighting,
        )

    def _loss(self, questions: Questions, weights: Tensor, phi: Tensor, batch: tuple[int, ...]) -> Tensor:
        rows = batch_rows(len(questions), self.batch_size, self.seed, batch)
        memory = self.memory(phi)
        prior = log_prior(weights, self.budget).to(questions.keys)
        terms = memory.terms(questions.keys[rows], log_prior=prior)
        return self.scorer.losses([questions.examples[row] for row in rows], memory, terms).sum() / len(rows)


def log_prior(weights: Tensor, budget: int) -> Tensor:
    """log pi_i = log(w_i / B) of `weights` [N]: exactly -inf at w_i = 0, with gradient 0 instead of NaN.

    An entry of pi = 0 has alpha = 0: under "sqrt" its tokens have logit 0 and value 0, under "prior" it is left out.
    sqrt(alpha) has no derivative there; with 0 for it, only the coverage term can bring such an entry back.
    """
    used = weights > 0
    return torch.where(used, (torch.where(used, weights, 1.0) / budget).log(), -math.inf)
