"""Training of a few parameters of a backbone on the current task and on anchors, with a searched learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from selector.data import Example
from selector.objective import Scorer, batch_rows

WARM_UP = 0.1  # of the steps
MAX_NORM = 1.0  # of the gradient
KEEP_LOSS_EVERY = 10  # steps


@dataclass
class Fit:
    """AdamW on the mean NLL of batches; half of each batch are anchors where there are any.

    `autocast` computes in bfloat16 while training; parameters, optimizer and every loss that is reported stay float32.
    """

    scorer: Scorer
    parameters: Sequence[nn.Parameter]
    training: Sequence[Example]
    validation: Sequence[Example]
    anchors: Sequence[Example]
    batch_size: int
    seed: tuple[int, ...]
    autocast: bool
    judge_anchors: bool  # whether the search weighs the anchors' NLL like that of the validation examples
    start: list[Tensor] = field(init=False)  # the parameters before any step

    def __post_init__(self) -> None:
        self.start = [parameter.detach().clone() for parameter in self.parameters]

    def search(self, rates: Sequence[float], steps: int) -> tuple[float, list[dict[str, float]]]:
        """Tries each learning rate for the same few steps from the same start; the lowest criterion wins.

        A single rate is not tried.
        """
        if len(rates) == 1:
            return rates[0], []
        trials = []
        for rate in rates:
            self.run(rate, steps)
            trial = {"learning_rate": rate, "validation_nll": self.mean_loss(self.validation)}
            trial["criterion"] = trial["validation_nll"]
            if self.anchors and self.judge_anchors:
                trial["anchor_nll"] = self.mean_loss(self.anchors)
                trial["criterion"] += trial["anchor_nll"]
            trials.append(trial)
        return min(trials, key=lambda trial: trial["criterion"])["learning_rate"], trials

    def run(self, rate: float, steps: int) -> list[dict[str, Any]]:
        """From the start, `steps` steps with a short linear rise of the learning rate and a cosine fall."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, self.start, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.AdamW(self.parameters, lr=rate, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, steps))
        history = []
        for step in range(steps):
            with torch.autocast(self.device_type, torch.bfloat16, enabled=self.autocast):
                losses = self.scorer.losses(self.batch(step))
            optimizer.zero_grad(set_to_none=True)
            losses.mean().backward()
            nn.utils.clip_grad_norm_(self.parameters, MAX_NORM)
            optimizer.step()
            schedule.step()
            if step % KEEP_LOSS_EVERY == 0 or step == steps - 1:
                history.append({"step": step, "loss": float(losses.detach().mean())})
        return history

    def batch(self, step: int) -> list[Example]:
        """Of the current task, and as many anchors; the same for every learning rate."""
        replayed = self.batch_size // 2 if self.anchors else 0
        new = batch_rows(len(self.training), self.batch_size - replayed, self.seed[0], (*self.seed[1:], 0, step))
        batch = [self.training[row] for row in new]
        if replayed:
            old = batch_rows(len(self.anchors), replayed, self.seed[0], (*self.seed[1:], 1, step))
            batch += [self.anchors[row] for row in old]
        return batch

    @torch.no_grad()
    def mean_loss(self, examples: Sequence[Example], batch_size: int = 64) -> float:
        """Mean NLL."""
        total = 0.0
        for start in range(0, len(examples), batch_size):
            total += float(self.scorer.losses(examples[start : start + batch_size]).double().sum())
        return total / len(examples)

    @property
    def device_type(self) -> str:
        return self.scorer.backbone.device.type


def share_of_rate(step: int, steps: int) -> float:
    """Of the learning rate at `step`: up to 1 over the first tenth, then along a cosine towards 0."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))
