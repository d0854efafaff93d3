"""The inner problem: where it starts, that its steps are torch's AdamW, and that they can be differentiated."""

from __future__ import annotations

import torch
from torch import Tensor

from selector.paper.calibration import L2_PENALTY, Calibration, fit, leaf
from selector.update.parametrization import UNIFORM_TEMPERATURE, temperature, value_gates

LAYERS = 3


def bowl(phi: Tensor, shift: Tensor | float = 0.5) -> Tensor:
    """Smooth, not quadratic, minimum away from the start."""
    return (torch.cosh(phi - shift) * torch.tensor([1.0, 2.0, 0.5, 3.0])).sum()


def test_it_starts_where_the_paper_starts() -> None:
    calibration = Calibration.initial(LAYERS)
    torch.testing.assert_close(calibration.temperature, torch.tensor(0.07, dtype=torch.float64))
    assert calibration.value_gates.tolist() == [0.5] * LAYERS


def test_its_steps_are_those_of_torch_adamw() -> None:
    phi = Calibration.initial(LAYERS).phi.requires_grad_()
    optimizer = torch.optim.AdamW([phi], lr=1e-2, betas=(0.9, 0.999), weight_decay=0)
    for _ in range(25):
        optimizer.zero_grad()
        (bowl(phi) + L2_PENALTY * (phi**2).sum()).backward()
        optimizer.step()
    # In two portions, so that the optimiser's state must live on between them.
    calibration = fit(Calibration.initial(LAYERS), lambda p, _: bowl(p), 10)
    calibration = fit(calibration, lambda p, _: bowl(p), 15)
    assert calibration.steps == 25
    torch.testing.assert_close(calibration.phi, phi.detach(), rtol=1e-12, atol=1e-14)


def test_what_is_not_fitted_stays_to_the_bit() -> None:
    """Gates of 1, or one temperature for all weights; the rest goes the way it would go alone."""
    gates = Calibration.initial(LAYERS, fit_gates=False)
    ungated = fit(gates, lambda p, _: (temperature(p) - 0.2) ** 2 + value_gates(p).cosh().sum(), 20)
    assert ungated.value_gates.tolist() == [1.0] * LAYERS
    alone = fit(Calibration.initial(0), lambda p, _: (temperature(p) - 0.2) ** 2, 20)
    assert torch.equal(ungated.phi[:1], alone.phi)
    assert ungated.temperature != gates.temperature

    uniform = Calibration.initial(LAYERS, fit_temperature=False)
    fitted = fit(uniform, lambda p, _: 0.3 / temperature(p) + (value_gates(p) - 0.9).square().sum(), 20)
    assert fitted.temperature == uniform.temperature == UNIFORM_TEMPERATURE
    assert (fitted.value_gates > 0.5).all()
    scores = torch.linspace(-1, 1, 9)
    assert torch.equal((scores / fitted.temperature.float()).softmax(0), torch.full((9,), 1 / 9))


def test_differentiable_steps_take_the_same_way() -> None:
    start = Calibration.initial(LAYERS)
    plain = fit(start, lambda p, _: bowl(p), 7)
    unrolled = fit(start, lambda p, _: bowl(p), 7, differentiable=True)
    assert torch.equal(plain.phi, unrolled.phi)
    assert torch.equal(plain.square, unrolled.square)
    assert not plain.phi.requires_grad


def test_gradients_through_the_steps_agree_with_finite_differences() -> None:
    warm = fit(Calibration.initial(LAYERS), lambda p, _: bowl(p), 3)

    def end(shift: Tensor) -> Tensor:
        return bowl(fit(warm, lambda p, _: bowl(p, shift), 5, differentiable=True).phi, 0.1)

    assert torch.autograd.gradcheck(end, (leaf(torch.linspace(-1, 1, 1 + LAYERS, dtype=torch.float64)),))


def test_a_parameter_without_gradient_gives_no_nan() -> None:
    scale = leaf(torch.tensor(2.0, dtype=torch.float64))
    # sigmoid(0) gates start at phi = 0, where the penalty has no slope either.
    fitted = fit(Calibration.initial(LAYERS), lambda p, _: scale * p[0] ** 2, 2, differentiable=True)
    assert fitted.phi[1:].tolist() == [0.0] * LAYERS
    (gradient,) = torch.autograd.grad(fitted.phi.sum(), scale)
    assert gradient.isfinite()
