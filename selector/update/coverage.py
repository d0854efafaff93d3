"""Spectral coverage: how well the chosen keys spread over the frozen retrieval space (paper, Eq. spec_rewrite).

    Omega(w) = -log det( C(w) + eps I ),    C(w) = sum_i pi_i z_i z_i',    pi_i = w_i / B,    z_i = P' r_i

Shapes: N candidates, B budget, d hidden size, d' = min(d, 256) dimensions of the projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PROJECTION_SIZE = 256
STABILIZER = 1e-3  # eps
PROJECTION_SEED = 0


def orthonormal_projection(hidden_size: int) -> Tensor:
    """P [d, d'] float64 with P'P = I: the Q of a Gaussian matrix, the same for every task of a stream.

    If d < 256, then d' = d and P is a rotation.
    """
    size = min(hidden_size, PROJECTION_SIZE)
    generator = torch.Generator().manual_seed(PROJECTION_SEED)
    gaussian = torch.randn(hidden_size, size, dtype=torch.float64, generator=generator)
    q, r = torch.linalg.qr(gaussian)
    # The sign of each column depends on the library; a positive diagonal of R fixes it.
    projection: Tensor = q * r.diagonal().sign()
    return projection


@dataclass(frozen=True)
class Coverage:
    """Omega over one set of candidates."""

    projected: Tensor  # [N, d'] float64: z
    budget: int  # B

    @classmethod
    def of_keys(cls, keys: Tensor, budget: int) -> Coverage:
        """`keys` [N, d], unit norm, any float type."""
        keys = keys.double().cpu()
        return cls(keys @ orthonormal_projection(keys.shape[1]), budget)

    def value(self, weights: Tensor) -> Tensor:
        """Omega(w) of `weights` [N] float64: [] float64, differentiable."""
        return -2 * self._factor(weights).diagonal().log().sum()

    @torch.no_grad()
    def gradient(self, weights: Tensor) -> Tensor:
        """d Omega / d w_i = -z_i' A^-1 z_i / B with A = C(w) + eps I (paper, Eq. omega_grad_coord): [N] float64.

        At most 1 / (B eps) in absolute value where |z_i| <= 1 (Eq. omega_grad_bound).
        """
        factor = self._factor(weights)
        whitened = torch.linalg.solve_triangular(factor, self.projected.T, upper=False)  # [d', N]
        gradient: Tensor = -(whitened**2).sum(dim=0) / self.budget
        return gradient

    def _factor(self, weights: Tensor) -> Tensor:
        """The lower Cholesky factor of A: [d', d'] float64."""
        shares = weights / self.budget  # [N]: pi
        covariance = self.projected.T @ (shares[:, None] * self.projected)  # [d', d']
        identity = torch.eye(covariance.shape[0], dtype=covariance.dtype)
        factor: Tensor = torch.linalg.cholesky(covariance + STABILIZER * identity)
        return factor
