"""What an update by the refined recipe will take, from a few examples of the task."""

from dataclasses import dataclass, replace

import torch

from inducekv_vllm.backbone.footprint import FLOAT16_BYTES

from ..backbone.model import Backbone
from ..backbone.scoring import EVALUATION_BATCHES, Scorer
from ..backbone.tiled_attention import tiled_attention
from ..backbone.token_values import layers_of_gate
from ..update.inputs import TaskInputs
from .candidates import every_candidate, rungs_for
from .duration import seconds_of_search
from .entries import initial_entries, questions_of
from .settings import RefinedSettings
from .training import TrainingProblem, log_prior


@dataclass(frozen=True)
class Estimate:
    new_bytes: int  # of the task's entries
    trainings: int  # that are begun
    seconds: float  # of all training, at most


def estimate(backbone: Backbone, inputs: TaskInputs, settings: RefinedSettings) -> Estimate:
    """Times two steps of each kind of training, on as many examples as two steps need. Raises as `update_refined`."""
    few = max(2 * settings.batch_size, settings.entries_per_task)
    inputs = replace(inputs, training=inputs.training[:few], validation=inputs.validation[:few])
    scorer = Scorer(backbone, batch_size=EVALUATION_BATCHES * settings.batch_size)
    training, validation = (
        questions_of(backbone, examples, settings) for examples in (inputs.training, inputs.validation)
    )
    entries, records = initial_entries(backbone, inputs, settings)
    parts = (entries.retrieval_keys, entries.payload_keys, entries.payload_values, entries.map_in, entries.map_out)
    numbers = sum(part.numel() for part in parts if part is not None)
    calibrate = settings.form == "merged" and inputs.previous is None
    with tiled_attention(backbone), torch.random.fork_rng():
        problem = TrainingProblem(scorer, entries, training, log_prior(inputs.training, records), validation, calibrate)
        candidates = every_candidate(problem, settings, layers_of_gate(backbone)[-1])
        seconds = 0.0
        if settings.steps:
            seconds = seconds_of_search([each.training for each in candidates], rungs_for(backbone))
    return Estimate(FLOAT16_BYTES * numbers, len(candidates), seconds)
