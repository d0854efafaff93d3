"""MAS on LoRA: weights that the outputs of earlier tasks are sensitive to are held (Aljundi et al., 2018).

    loss + strength sum_i Omega_i (w_i - w*_i)^2

Omega sums over the earlier tasks the mean, over examples of the task, of the absolute gradient of the squared L2 norm
of the output. No label is used: of an answer's tokens only the places are taken. The output is the probabilities of the
next token; the original takes a classifier's logits, which a language model has only up to a constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.research.continual.methods.ewc import Ewc
from selector.backbone.scoring import Scorer
from selector.data.examples import Example


@dataclass(frozen=True)
class Mas(Ewc):
    """LoRA with memory aware synapses; `strength` is twice the lambda, as EWC's penalty is halved."""

    name: str = "mas"
    strength: float = 2e4  # twice VQACL's default

    def importance(
        self, scorer: Scorer, parameters: Sequence[nn.Parameter], examples: Sequence[Example]
    ) -> list[Tensor]:
        return sensitivity(scorer, parameters, examples)


def sensitivity(scorer: Scorer, parameters: Sequence[nn.Parameter], examples: Sequence[Example]) -> list[Tensor]:
    """Mean over the examples of |d ||p||^2 / d w|, p the probabilities at their answers' places, float32."""
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for example in examples:
        (predicted,) = scorer.predicted([example])  # [answer tokens, vocabulary]
        gradients = torch.autograd.grad(predicted.exp().square().sum(), parameters)
        for each, gradient in zip(total, gradients, strict=True):
            each += gradient.abs() / len(examples)
    return total
