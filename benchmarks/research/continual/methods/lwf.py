"""LwF on LoRA: the answers to the new task's questions are held to the old ones (Li and Hoiem, 2016).

    loss + strength T^2 KL(p_old^(1/T) | p_new^(1/T))

Before a task, the model with the previous adapter (before the first task: the untouched model) predicts every token of
the new task's answers, and these distributions are recorded. In training the model is held to them, at temperature T.
Only the adapter is kept from one task to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from benchmarks.fit import Penalty
from benchmarks.research.continual.methods.lora import AdapterTraining, Lora
from selector.backbone.scoring import Scorer
from selector.data.examples import Example


@dataclass(frozen=True)
class Lwf(Lora):
    """LoRA with learning without forgetting."""

    name: str = "lwf"
    strength: float = 0.3
    temperature: float = 2.0  # T, Li and Hoiem's

    def penalty(self, training: AdapterTraining) -> Penalty:
        recorded = record(training.scorer, training.task.train)

        def held(batch: Sequence[Example], predicted: Sequence[Tensor]) -> Tensor:
            targets = [recorded[example.id] for example in batch]
            return self.strength * divergence(targets, predicted, self.temperature).mean()

        return held


@torch.no_grad()
def record(scorer: Scorer, examples: Sequence[Example], batch_size: int = 64) -> dict[str, Tensor]:
    """The model's present predictions, by example: log-probabilities [answer tokens, vocabulary] float32."""
    starts = range(0, len(examples), batch_size)
    predicted = [rows for start in starts for rows in scorer.predicted(examples[start : start + batch_size])]
    return dict(zip((example.id for example in examples), predicted, strict=True))


def divergence(targets: Sequence[Tensor], predicted: Sequence[Tensor], temperature: float) -> Tensor:
    """T^2 KL(target | predicted), softened by T, summed over an answer's tokens; [answer tokens, vocabulary] -> [n]."""

    def softened(rows: Tensor) -> Tensor:
        return (rows / temperature).log_softmax(dim=-1)

    pairs = zip(predicted, targets, strict=True)
    divergences = [kl_div(softened(new), softened(old), reduction="sum", log_target=True) for new, old in pairs]
    return temperature**2 * torch.stack(divergences)
