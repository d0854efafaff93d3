"""EWC on LoRA: a penalty holds the weights that earlier tasks depend on (Kirkpatrick et al., 2017).

    loss + strength / 2 sum_i F_i (w_i - w*_i)^2

w* are the adapter's weights after the previous task, and F sums the diagonal Fisher information of the earlier tasks,
each at the weights after it was learned: the online form (Schwarz et al., 2018) with decay 1. A task's Fisher is the
empirical one: the mean, over examples of the task, of the squared gradient of the example's own NLL.

Only training needs F: it is in the state in float32, and its bytes are reported apart from those stored for inference.
w* is the adapter itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from benchmarks.fit import Penalty
from benchmarks.research.continual.methods.lora import AdapterTraining, Lora
from selector.backbone.scoring import Scorer
from selector.data.examples import Example
from selector.runtime.files import replace_file

FISHER = "fisher.safetensors"


@dataclass(frozen=True)
class Ewc(Lora):
    """LoRA with elastic weight consolidation."""

    name: str = "ewc"
    strength: float = 1e4  # lambda
    decay: float = 1.0  # of the Fisher information of earlier tasks, with each new one
    fisher_examples: int = 128

    def penalty(self, training: AdapterTraining) -> Penalty | None:
        if training.previous is None:
            return None
        fisher = read_fisher(training)
        anchor = [parameter.detach().clone() for parameter in training.parameters]
        return lambda batch, predicted: self.strength / 2 * distance(training.parameters, anchor, fisher)

    def keep(self, training: AdapterTraining) -> dict[str, Any]:
        rng = np.random.default_rng((training.context.seed, training.context.number, 2))
        examples = training.task.train
        rows = rng.choice(len(examples), min(self.fisher_examples, len(examples)), replace=False)
        fisher = self.importance(training.scorer, training.parameters, [examples[row] for row in rows])
        report = {"fisher_trace": float(sum(values.sum() for values in fisher))}
        if training.previous is not None:
            fisher = [self.decay * old + new for old, new in zip(read_fisher(training), fisher, strict=True)]
        tensors = {f"{number:04d}": values for number, values in enumerate(fisher)}
        replace_file(training.out / FISHER, safetensors.torch.save(tensors))
        return report | {"training_state_bytes": sum(values.nbytes for values in fisher)}

    def importance(
        self, scorer: Scorer, parameters: Sequence[nn.Parameter], examples: Sequence[Example]
    ) -> list[Tensor]:
        """How much each weight matters to a task: of each parameter's shape, float32."""
        return diagonal_fisher(scorer, parameters, examples)


def read_fisher(training: AdapterTraining) -> list[Tensor]:
    """F of the previous state, in the order of the adapter's parameters and of their shapes, float32."""
    assert training.previous is not None
    tensors = safetensors.torch.load_file(training.previous / FISHER)
    return [tensors[name] for name in sorted(tensors)]


def diagonal_fisher(scorer: Scorer, parameters: Sequence[nn.Parameter], examples: Sequence[Example]) -> list[Tensor]:
    """Mean over the examples of the squared gradient of each one's NLL, of each parameter's shape, float32."""
    fisher = [torch.zeros_like(parameter) for parameter in parameters]
    for example in examples:
        gradients = torch.autograd.grad(scorer.losses([example]).sum(), parameters)
        for total, gradient in zip(fisher, gradients, strict=True):
            total += gradient.square() / len(examples)
    return fisher


def distance(parameters: Sequence[Tensor], anchor: Sequence[Tensor], fisher: Sequence[Tensor]) -> Tensor:
    """sum_i F_i (w_i - w*_i)^2: []."""
    terms = [(f * (w - a).square()).sum() for w, a, f in zip(parameters, anchor, fisher, strict=True)]
    return torch.stack(terms).sum()
