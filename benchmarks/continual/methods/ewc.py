"""EWC on LoRA: weights that earlier tasks depend on are held where they are (Kirkpatrick et al., 2017).

    loss + strength / 2 sum_i F_i (w_i - w*_i)^2

w* are the adapter's weights after the task before, and F sums the diagonal Fisher information of the tasks before, each
at the weights it was learnt to: the online form (Schwarz et al., 2018) with decay 1. A task's Fisher is the empirical
one: the mean, over examples of the task, of the squared gradient of the example's own NLL.

F is needed for training alone: it lies in the state in float32, and its bytes are reported beside those stored for
inference. w* is the adapter itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from benchmarks.continual.methods.fit import Penalty
from benchmarks.continual.methods.lora import Lesson, Lora
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
    trials: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"learning_rate": 5e-4, "strength": 1e3},
        {"learning_rate": 1e-3, "strength": 1e4},
        {"learning_rate": 1e-3, "strength": 1e5},
    )

    def penalty(self, lesson: Lesson) -> Penalty | None:
        if lesson.previous is None:
            return None
        fisher = read_fisher(lesson)
        anchor = [parameter.detach().clone() for parameter in lesson.parameters]
        return lambda batch, predicted: self.strength / 2 * distance(lesson.parameters, anchor, fisher)

    def keep(self, lesson: Lesson) -> dict[str, Any]:
        rng = np.random.default_rng((lesson.circumstances.seed, lesson.circumstances.number, 2))
        training = lesson.task.train
        rows = rng.choice(len(training), min(self.fisher_examples, len(training)), replace=False)
        fisher = diagonal_fisher(lesson.scorer, lesson.parameters, [training[row] for row in rows])
        report = {"fisher_trace": float(sum(values.sum() for values in fisher))}
        if lesson.previous is not None:
            fisher = [self.decay * old + new for old, new in zip(read_fisher(lesson), fisher, strict=True)]
        tensors = {f"{number:04d}": values for number, values in enumerate(fisher)}
        replace_file(lesson.out / FISHER, safetensors.torch.save(tensors))
        return report | {"training_state_bytes": sum(values.nbytes for values in fisher)}


def read_fisher(lesson: Lesson) -> list[Tensor]:
    """What the state before holds, in the order of the adapter's parameters and of their shapes, float32."""
    assert lesson.previous is not None
    tensors = safetensors.torch.load_file(lesson.previous / FISHER)
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
