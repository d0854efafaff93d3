"""Log-det coverage: its value, and its closed-form gradient."""

import numpy as np
import pytest
import torch
from torch import Tensor

from selector.paper.simplex import project
from selector.update.coverage import PROJECTION_SIZE, STABILIZER, Coverage, orthonormal_projection
from tests.unit.selector.exact import unit_vectors

BUDGET = 6


def unit_keys(n: int, d: int, seed: int = 0) -> Tensor:
    return unit_vectors(n, d, seed=seed, dtype=torch.float64)


def random_weights(n: int, seed: int) -> Tensor:
    """A point of the simplex, some of whose coordinates are 0."""
    generator = torch.Generator().manual_seed(seed)
    return project(torch.randn(n, dtype=torch.float64, generator=generator), BUDGET)


@pytest.mark.parametrize("d", [8, 300])
def test_the_value_is_the_log_determinant(d: int) -> None:
    """Below 256 dimensions it is that of the keys themselves."""
    keys, weights = unit_keys(20, d), random_weights(20, 1)
    z = (keys @ orthonormal_projection(d) if d > PROJECTION_SIZE else keys).numpy()
    matrix = sum(w / BUDGET * np.outer(row, row) for w, row in zip(weights.tolist(), z, strict=True))
    sign, logdet = np.linalg.slogdet(matrix + STABILIZER * np.eye(z.shape[1]))
    assert sign == 1
    assert float(Coverage.of_keys(keys, BUDGET).value(weights)) == pytest.approx(-logdet, rel=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("d", [8, 300])
def test_the_gradient_is_that_of_autograd(d: int, seed: int) -> None:
    coverage = Coverage.of_keys(unit_keys(25, d, seed), BUDGET)
    weights = random_weights(25, seed).requires_grad_()
    (expected,) = torch.autograd.grad(coverage.value(weights), weights)
    torch.testing.assert_close(coverage.gradient(weights.detach()), expected, rtol=1e-10, atol=1e-12)
