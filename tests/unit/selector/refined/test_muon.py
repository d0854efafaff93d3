"""Muon on a stack of matrices, against torch's on each of them and against the singular value decomposition."""

import pytest
import torch
from torch import Tensor

from selector.refined.muon import MOMENTUM, Muon

RATE = 0.3


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(muon: Muon, parameter: Tensor, gradient: Tensor) -> Tensor:
    """Take a step along `gradient`; returns the momentum."""
    parameter.grad = gradient
    muon.step()
    momentum: Tensor = muon.state[parameter]["momentum"]
    return momentum


@pytest.mark.parametrize("shape", [(2, 3, 8, 64), (2, 3, 64, 8), (1, 1, 5, 5), (1, 1, 1, 16)])
@pytest.mark.parametrize(("momentum", "decay"), [(MOMENTUM, 0.0), (0.95, 0.1)])
def test_steps_are_those_of_torchs_muon_on_each_matrix(shape: tuple[int, ...], momentum: float, decay: float) -> None:
    """Torch's multiplies in bfloat16, of 8 significant bits, fifteen times over: its steps are a few hundredths off."""
    start = random(*shape)
    values = start.clone().requires_grad_()
    muon = Muon([values], lr=RATE, momentum=momentum, weight_decay=decay)
    alone = [matrix.clone().requires_grad_() for matrix in start.flatten(0, 1)]
    torchs = torch.optim.Muon(
        alone, lr=RATE, weight_decay=decay, momentum=momentum, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for number in range(4):
        gradients = random(*shape, seed=1 + number) * 10.0 ** (number - 2)
        before, before_alone = values.detach().clone(), torch.stack([m.detach().clone() for m in alone])
        momenta = step(muon, values, gradients)
        for matrix, gradient in zip(alone, gradients.flatten(0, 1), strict=True):
            matrix.grad = gradient.clone()
        torchs.step()
        change = (values.detach() - before).flatten(0, 1)
        expected = torch.stack([m.detach() for m in alone]) - before_alone
        error = (change - expected).norm(dim=(-2, -1)) / expected.norm(dim=(-2, -1))
        assert error.max() <= 0.03
        assert torch.equal(momenta.flatten(0, 1), torch.stack([torchs.state[m]["momentum_buffer"] for m in alone]))


def test_a_matrix_without_a_gradient_does_not_move() -> None:
    values = random(2, 8, 16)
    muon = Muon([values], lr=RATE)
    before = step(muon, values, random(2, 8, 16, seed=1)).clone(), values.clone()
    gradients = random(2, 8, 16, seed=2)
    gradients[1] = 0
    momentum = step(muon, values, gradients)
    assert torch.equal(values[1], before[1][1])
    assert torch.equal(momentum[1], before[0][1])
    assert not torch.isclose(values[0], before[1][0]).all()
