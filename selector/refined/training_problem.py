"""What the refined recipe trains, and on which questions.

Shapes: K entries of the next memory, n questions, S subsets of the entries, d hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inducekv_vllm.bundle import EntryRecord
from inducekv_vllm.bundle.activation import Activation

from ..backbone.injection import Memory
from ..backbone.scoring import Questions, Scorer
from ..data.examples import Example
from ..update.inputs import TaskInputs
from .entries import EntryPlan, new_task
from .settings import RefinedSettings


@dataclass(frozen=True)
class TaskKeys:
    """Retrieval keys [n, d] of an update's questions."""

    training: Tensor
    validation: Tensor
    anchors: Tensor  # of the anchors that are `trained_anchors`


@dataclass(frozen=True)
class RoutedQuestions:
    """Questions and the entries that each may retrieve."""

    questions: Questions
    log_prior: Tensor  # [n, K] float32: 0, or -inf for an entry that must not be retrieved

    def __len__(self) -> int:
        return len(self.questions)


@dataclass(frozen=True)
class Teacher:
    """The previous memory, whose answers to the anchors are distilled."""

    memory: Memory
    log_prior: Tensor  # [number of anchors, number of its entries] float32


@dataclass(frozen=True)
class TrainingProblem:
    """What is trained, and on what."""

    scorer: Scorer
    memory: Memory  # K entries in float32, before training
    trainable: Tensor  # [K] bool
    current: RoutedQuestions
    anchors: RoutedQuestions | None  # of tasks whose entries are trained; of all tasks if the calibration is
    teacher: Teacher | None  # for the anchors
    calibrate: bool  # train temperature, gates and layer bias too
    # [S, K] bool, row 0 all True: the entries that a step may use, each row a subset of the one before. Every second
    # step uses row 0, every fourth row 1, and so on, so that a task's first half works alone when its quota is halved.
    nested: Tensor


def prepare_problem(
    scorer: Scorer,
    inputs: TaskInputs,
    settings: RefinedSettings,
    keys: TaskKeys,
    plan: EntryPlan,
    start: Memory,
    records: tuple[EntryRecord, ...],
    activations: Mapping[str, Activation],
) -> TrainingProblem:
    """New entries train on the task; entries of shrunk tasks train on their anchors.

    `activations` are by task, old and new; empty for merged memory.
    """
    tasks = [record.task for record in records]
    task = new_task(inputs.training)
    trained = trained_anchors(inputs, settings, plan)
    anchors = questions(scorer, trained, keys.anchors, activations)
    teacher = None
    if inputs.previous is not None and trained:
        prior = log_prior(trained, inputs.previous.metadata.entries, settings)
        teacher = Teacher(Memory.from_bundle(inputs.previous), prior)
    training = questions(scorer, inputs.training, keys.training, activations)
    return TrainingProblem(
        scorer=scorer,
        memory=start,
        trainable=torch.tensor([name == task or name in plan.shrunk for name in tasks]),
        current=RoutedQuestions(training, log_prior(inputs.training, records, settings)),
        anchors=RoutedQuestions(anchors, log_prior(trained, records, settings)) if trained else None,
        teacher=teacher,
        calibrate=_calibrates(inputs, settings),
        nested=nested_subsets(torch.tensor([name == task for name in tasks]), settings),
    )


def trained_anchors(inputs: TaskInputs, settings: RefinedSettings, plan: EntryPlan) -> list[Example]:
    """The anchors of tasks whose entries are trained again; of all tasks if the calibration is trained."""
    tasks = {*plan.shrunk, *(plan.shares if _calibrates(inputs, settings) else ())}
    return [anchor for anchor in inputs.anchors if anchor.task in tasks]


def _calibrates(inputs: TaskInputs, settings: RefinedSettings) -> bool:
    return settings.calibrate == "every" or (settings.calibrate == "first" and inputs.previous is None)


def questions(
    scorer: Scorer, examples: Sequence[Example], keys: Tensor, activations: Mapping[str, Activation]
) -> Questions:
    """Examples with retrieval keys [n, d]; `activations` by task, empty for merged memory."""
    first_active = scorer.first_active(examples, [activations[e.task] for e in examples]) if activations else None
    return Questions(examples, keys, first_active)


def nested_subsets(new: Tensor, settings: RefinedSettings) -> Tensor:
    """[S, K] bool: all entries; then, of the `new` ones [K] bool, only the first half, the first quarter, and so on."""
    place = new.cumsum(0)  # [K] int64, of a new entry among the new ones, from 1
    shares = [int(place[-1])]
    while settings.nested and shares[-1] > 1:
        shares.append(shares[-1] // 2)
    return torch.stack([~new | (place <= share) for share in shares])


def log_prior(examples: Sequence[Example], entries: Sequence[EntryRecord], settings: RefinedSettings) -> Tensor:
    """[n, K] float32: 0 for the entries of an example's task; -inf for others, and for the entry made of the example.

    Without a gate the entries of other tasks compete too. An example whose task has only the entry made of it keeps it.
    """
    all_tasks = settings.gate == "none"
    reachable = np.array([[all_tasks or e.task == entry.task for entry in entries] for e in examples])  # [n, K] bool
    own = np.array([[e.source_digest == entry.source_digest for entry in entries] for e in examples])  # [n, K] bool
    others = reachable & ~own
    allowed = np.where(others.any(axis=1, keepdims=True), others, reachable)
    return torch.zeros(allowed.shape).masked_fill(torch.from_numpy(~allowed), -math.inf)
