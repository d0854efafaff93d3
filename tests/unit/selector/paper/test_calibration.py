"""The inner problem: where it starts, and that its steps are torch's AdamW."""

import torch
from torch import Tensor

from selector.paper.calibration import L2_PENALTY, Calibration

LAYERS = 3


def bowl(phi: Tensor, shift: float = 0.5) -> Tensor:
    """Smooth, not quadratic, minimum away from the start."""
    return (torch.cosh(phi - shift) * torch.tensor([1.0, 2.0, 0.5, 3.0])).sum()


def test_its_steps_are_those_of_torch_adamw() -> None:
    phi = Calibration(LAYERS).phi.requires_grad_()
    optimizer = torch.optim.AdamW([phi], lr=1e-2, betas=(0.9, 0.999), weight_decay=0)
    for _ in range(25):
        optimizer.zero_grad()
        (bowl(phi) + L2_PENALTY * (phi**2).sum()).backward()
        optimizer.step()
    # In two portions, so that the optimiser's state must live on between them.
    calibration = Calibration(LAYERS)
    for steps in (10, 15):
        calibration.fit(lambda p, _: bowl(p), steps)
    torch.testing.assert_close(calibration.phi, phi.detach(), rtol=1e-12, atol=1e-14)
