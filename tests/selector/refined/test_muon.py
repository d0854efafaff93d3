"""Muon on a stack of matrices, against torch's on each of them and against the singular value decomposition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from selector.refined.muon import MOMENTUM, muon_step, orthogonalized

RATE = 0.3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(2, 3, 8, 64), (2, 3, 64, 8), (1, 1, 5, 5), (1, 1, 1, 16)])
def test_steps_are_those_of_torchs_muon_on_each_matrix(shape: tuple[int, ...]) -> None:
    """Torch's multiplies in bfloat16, of 8 significant bits, fifteen times over: its steps are a few hundredths off."""
    start = random(*shape)
    values, momenta = start, torch.zeros(shape)
    alone = [matrix.clone().requires_grad_() for matrix in start.flatten(0, 1)]
    torchs = torch.optim.Muon(
        alone, lr=RATE, weight_decay=0.0, momentum=MOMENTUM, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for number in range(4):
        gradients = random(*shape, seed=1 + number) * 10.0 ** (number - 2)
        before, before_alone = values, torch.stack([m.detach().clone() for m in alone])
        values, momenta = muon_step(values, gradients, momenta, RATE)
        for matrix, gradient in zip(alone, gradients.flatten(0, 1), strict=True):
            matrix.grad = gradient.clone()
        torchs.step()
        found, expected = (values - before).flatten(0, 1), torch.stack([m.detach() for m in alone]) - before_alone
        off = (found - expected).norm(dim=(-2, -1)) / expected.norm(dim=(-2, -1))
        assert off.max() <= 0.03
        assert torch.equal(momenta.flatten(0, 1), torch.stack([torchs.state[m]["momentum_buffer"] for m in alone]))


def test_singular_vectors_stay_and_singular_values_become_alike() -> None:
    matrices = random(4, 8, 64)
    u, s, vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    between = u.mT @ orthogonalized(matrices).double() @ vh.mT  # diagonal, where the singular vectors are the same
    found = between.diagonal(dim1=-2, dim2=-1)
    assert (between - found.diag_embed()).abs().max() < 1e-4
    assert s.max() / s.min() > 1.5
    assert found.min() > 0.65
    assert found.max() < 1.25


def test_a_step_does_not_depend_on_the_gradients_size() -> None:
    values, zeros = random(3, 8, 64), torch.zeros(3, 8, 64)
    small, _ = muon_step(values, 1e-3 * random(3, 8, 64, seed=1), zeros, RATE)
    large, _ = muon_step(values, 1e3 * random(3, 8, 64, seed=1), zeros, RATE)
    assert torch.allclose(small, large, atol=1e-5)
    assert (large - values).pow(2).mean().sqrt() == pytest.approx(0.2 * RATE, rel=0.2)


def test_a_matrix_that_nothing_asked_for_stays() -> None:
    values, momenta, gradients = random(2, 8, 16), random(2, 8, 16, seed=1), random(2, 8, 16, seed=2)
    gradients[1] = 0
    after, means = muon_step(values, gradients, momenta, RATE)
    assert torch.equal(after[1], values[1])
    assert torch.equal(means[1], momenta[1])
    assert not torch.isclose(after[0], values[0]).all()
