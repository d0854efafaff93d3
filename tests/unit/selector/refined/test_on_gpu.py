"""A training whose model is on a GPU and whose memory is not: the losses of one on the CPU."""

from pathlib import Path

import pytest
import torch

from inducekv_vllm.bundle.activation import ACTIVATIONS, Activation
from selector.backbone.extraction import extract, extract_keys
from selector.backbone.injection import TensorMemory
from selector.backbone.model import Backbone
from selector.backbone.scoring import Questions, Scorer
from selector.data.examples import read_task
from selector.refined.settings import RefinedSettings
from selector.refined.training import Training, TrainingProblem

pytestmark = pytest.mark.gpu


def losses(model: Path, device: str, task: Path, activation: Activation) -> torch.Tensor:
    """Of four steps. One entry of decoupled memory, made of the first example, which all of them retrieve."""
    backbone, examples = Backbone.load(model, device=device), read_task(task)[:8]
    entries = extract(backbone, examples[:1], 16)
    payloads = entries.payload_keys, entries.payload_values
    gates, bias = torch.full((backbone.num_layers,), 0.5), torch.zeros(backbone.num_layers)  # [layers]
    memory = TensorMemory(entries.keys, *payloads, torch.tensor(0.07), gates, bias, "uniform", "decoupled")
    scorer = Scorer(backbone)
    first_active = scorer.first_active(examples, [activation] * len(examples))
    questions = Questions(examples, extract_keys(backbone, examples), first_active)
    problem = TrainingProblem(scorer, memory, questions, torch.zeros(len(examples), 1), questions, False)
    training = Training(problem, RefinedSettings(steps=4, batch_size=4, precision="float32"), 0.1)
    for _ in range(4):
        training.take_step()
    return torch.tensor([record.current for record in training.history])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_losses_are_those_of_the_cpu(
    activation: Activation, model_folders: dict[str, Path], tasks: dict[str, Path]
) -> None:
    on_gpu, on_cpu = (losses(model_folders["llava"], each, tasks["colours"], activation) for each in ("cuda", "cpu"))
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-3)
