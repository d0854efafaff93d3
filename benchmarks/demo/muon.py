"""Muon in the precision of its parameters: `torch.optim.Muon` computes in bfloat16, which most CPUs only emulate."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from selector.refined.muon import ADAMW_RMS, orthogonalized


class Muon(torch.optim.Optimizer):
    """For weight matrices: momentum, made nearly orthogonal, of the size that AdamW's steps have."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                momentum = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 0.05)
                change = orthogonalized(matrix.grad.lerp(momentum, 0.95))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(change, alpha=-ADAMW_RMS * group["lr"] * max(matrix.shape) ** 0.5)
