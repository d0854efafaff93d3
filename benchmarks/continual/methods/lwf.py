"""LwF on LoRA: answers to the new task's questions shall stay what they were (Li and Hoiem, 2016).

    loss + strength T^2 KL(p_old^(1/T) | p_new^(1/T))

Before a task, the model as the task before left it (before the first task: the untouched model) predicts every token
of the new task's answers, and these distributions are recorded. While the task is learnt, the model is held to them,
at temperature T. Nothing is kept from one task to the next but the adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from benchmarks.continual.methods.fit import Penalty
from benchmarks.continual.methods.lora import Lesson, Lora
from selector.backbone.scoring import Scorer
from selector.data.examples import Example


@dataclass(frozen=True)
class Lwf(Lora):
    """LoRA with learning without forgetting."""

    name: str = "lwf"
    strength: float = 0.3
    temperature: float = 2.0  # T, Li and Hoiem's
    trials: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"learning_rate": 5e-4, "strength": 0.3},
        {"learning_rate": 1e-3, "strength": 0.3},
        {"learning_rate": 1e-3, "strength": 1.0},
    )

    def penalty(self, lesson: Lesson) -> Penalty:
        recorded = record(lesson.scorer, lesson.task.train)

        def held(batch: Sequence[Example], predicted: Sequence[Tensor]) -> Tensor:
            targets = [recorded[example.id] for example in batch]
            return self.strength * divergence(targets, predicted, self.temperature).mean()

        return held


@torch.no_grad()
def record(scorer: Scorer, examples: Sequence[Example], batch_size: int = 64) -> dict[str, Tensor]:
    """What the model predicts by now, by example: log-probabilities [answer tokens, vocabulary] float32."""
    recorded: dict[str, Tensor] = {}
    for start in range(0, len(examples), batch_size):
        part = examples[start : start + batch_size]
        recorded |= zip((example.id for example in part), scorer.predicted(part), strict=True)
    return recorded


def divergence(targets: Sequence[Tensor], predicted: Sequence[Tensor], temperature: float) -> Tensor:
    """T^2 KL(target | predicted), both softened by T, summed over the answer's tokens of each example: [n].

    Args:
        targets, predicted: log-probabilities [answer tokens, vocabulary].
    """

    def softened(rows: Tensor) -> Tensor:
        return (rows / temperature).log_softmax(dim=-1)

    pairs = zip(predicted, targets, strict=True)
    found = [kl_div(softened(mine), softened(old), reduction="sum", log_target=True) for mine, old in pairs]
    return temperature**2 * torch.stack(found)
