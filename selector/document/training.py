"""Gradient steps from a compacted start, by which the whole model says what the text's turns say.

Attention matching fits each layer alone, to what its own attention gives. These steps fit all layers at once, to the
answers of the turns (self-study: Eyuboglu et al., "Cartridges", 2025, arXiv:2506.06266, with its turns, not its loss).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ..backbone.injection import TensorMemory
from ..backbone.model import Backbone
from ..backbone.scoring import Questions, Scorer
from ..backbone.tiled_attention import tiled_attention
from ..data.examples import Example
from ..refined.candidates import train_told
from ..refined.settings import Precision
from ..refined.training import Training, TrainingProblem
from ..runtime.running import Run
from .settings import DocumentSettings

RATE: Final = 0.03  # Muon's: at 0.2 the loss rises


@dataclass(frozen=True)
class Steps:
    """All are taken: there are no validation questions to stop by."""

    steps: int
    precision: Precision
    seed: int
    batch_size: int = 4
    patience: None = None


def trained(
    backbone: Backbone,
    memory: TensorMemory,
    examples: Sequence[Example],
    settings: DocumentSettings,
    run: Run,
    name: str,
) -> TensorMemory:
    """After `settings.steps` steps, each on four of the examples.

    Args:
        name: of the training in a checkpoint and in progress.

    Raises:
        TaskDataError: a loss is not finite.
        BundleError: a key or a value has left the range of float16.
        ConfigError: the progress cannot be written, or its file is damaged.
    """
    asked = Questions(examples, memory.retrieval_keys.expand(len(examples), -1))
    prior, nothing = torch.zeros(len(examples), 1), Questions([], asked.keys[:0])
    steps = Steps(settings.steps, settings.precision, settings.seed)
    alone = torch.autocast(backbone.device.type, enabled=False)  # a step's products are of its own precision
    problem = TrainingProblem(Scorer(backbone), memory, asked, prior, nothing, calibrate=False)
    with alone, tiled_attention(backbone):
        return train_told(Training(problem, steps, RATE), name, name, settings.steps, run)
