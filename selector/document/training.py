"""Gradient steps from a compacted start, by which the whole model says what the text's turns say.

Attention matching fits each layer alone, to what its own attention gives. These steps fit all layers at once, to the
answers of the turns (self-study: Eyuboglu et al., "Cartridges", 2025, arXiv:2506.06266, with its turns, not its loss).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from ..backbone.injection import TensorMemory
from ..backbone.model import Backbone
from ..backbone.scoring import Questions, Scorer
from ..backbone.tiled_attention import tiled_attention
from ..refined.candidates import progress_text
from ..refined.settings import RefinedSettings
from ..refined.training import Training, TrainingProblem, train
from ..runtime.progress import progress_bar
from .questions import question
from .references import Turn
from .settings import DocumentSettings

RATE: Final = 0.03  # Muon's: at 0.2 the loss rises


def trained(
    backbone: Backbone, memory: TensorMemory, turns: Sequence[Turn], settings: DocumentSettings, progress: bool
) -> TensorMemory:
    """After `settings.steps` steps, each on four of the turns.

    Raises:
        TaskDataError: a loss is not finite.
        BundleError: a key or a value has left the range of float16.
    """
    examples = [question(turn.asked, turn.said, "turns", f"turn/{at}") for at, turn in enumerate(turns)]
    asked = Questions(examples, memory.retrieval_keys.expand(len(examples), -1))
    prior, nothing = torch.zeros(len(examples), 1), Questions([], asked.keys[:0])
    steps = RefinedSettings(
        form="merged", steps=settings.steps, patience=None, precision=settings.precision, seed=settings.seed
    )
    steps_alone = torch.autocast(backbone.device.type, enabled=False)  # a step's products are of its own precision
    with steps_alone, progress_bar("Training", settings.steps, progress) as advance, tiled_attention(backbone):
        problem = TrainingProblem(Scorer(backbone), memory, asked, prior, nothing, calibrate=False)
        return train(Training(problem, steps, RATE), None, "", lambda now: advance(now.step, progress_text(now)))
