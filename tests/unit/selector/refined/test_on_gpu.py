"""A training whose model is on a GPU and whose memory is not: the losses of one on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from selector.backbone.extraction import extract, extract_keys
from selector.backbone.injection import Memory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.data.examples import read_task
from selector.refined.settings import RefinedSettings
from selector.refined.training import Training, TrainingProblem

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("late", [False, True])
def test_the_losses_are_those_of_the_cpu(late: bool, model_folders: dict[str, Path], tasks: dict[str, Path]) -> None:
    """Memory of the whole prompt, and of the generation alone."""
    examples = list(read_task(tasks["colours"]))[:8]
    losses = []
    for device in ("cpu", "cuda"):
        backbone = Backbone.load(model_folders["llava"], device=device)
        entries, keys = extract(backbone, examples[:1], 4), extract_keys(backbone, examples)
        memory = Memory(
            entries.keys,
            entries.payload_keys,
            entries.payload_values,
            torch.tensor(0.07),
            torch.full((backbone.num_layers,), 0.5),
            torch.zeros(backbone.num_layers),
            "uniform",
            "decoupled",
        )
        scorer = Scorer(backbone)
        activations = ["generation" if late else "prompt"] * len(examples)
        questions = Questions(examples, keys, scorer.first_active(examples, activations))
        problem = TrainingProblem(scorer, memory, questions, torch.zeros(len(examples), 1), questions, False)
        training = Training(problem, RefinedSettings(steps=4, batch_size=4, precision="float32"), 0.1)
        for _ in range(4):
            training.take_step()
        losses.append([record.current for record in training.history])
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-3)
