"""What the refined recipe trains, and on what.

Letters: K entries of the next memory, n questions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from inducekv_vllm.bundle import EntryRecord

from ..backbone.injection import Memory
from ..backbone.scoring import Questions, Scorer
from ..data.examples import Example
from ..update.inputs import TaskInputs
from .entries import Plan, QueryKeys, arriving_task
from .settings import RefinedSettings
from .training import Lesson, Routed, Teacher


def prepare_lesson(
    scorer: Scorer,
    inputs: TaskInputs,
    settings: RefinedSettings,
    known: QueryKeys,
    plan: Plan,
    start: Memory,
    records: tuple[EntryRecord, ...],
) -> Lesson:
    """What is trained on what: new entries on the task, entries of shrunken tasks on their anchors."""
    tasks = [record.task for record in records]
    task = arriving_task(inputs.training)
    calibrate = settings.calibrate == "every" or (settings.calibrate == "first" and inputs.previous is None)
    taught = [
        row
        for row, anchor in enumerate(inputs.anchors)
        if anchor.task in plan.shrunk or (calibrate and anchor.task in plan.shares)
    ]
    examples = [inputs.anchors[row] for row in taught]
    anchors = Questions(examples, known.anchors[taught, 0])
    teacher = None
    if inputs.previous is not None and taught:
        teacher = Teacher(
            Memory.from_bundle(inputs.previous), _prior(examples, inputs.previous.metadata.entries, settings)
        )
    training = Questions(inputs.training, known.training[:, 0])
    return Lesson(
        scorer=scorer,
        memory=start,
        trainable=torch.tensor([name == task or name in plan.shrunk for name in tasks]),
        current=Routed(training, _prior(inputs.training, records, settings)),
        anchors=Routed(anchors, _prior(examples, records, settings)) if taught else None,
        teacher=teacher,
        calibrate=calibrate,
        nested=_nested(torch.tensor([name == task for name in tasks]), settings),
    )


def _nested(new: Tensor, settings: RefinedSettings) -> Tensor:
    """[S, K] bool: all entries; then of the `new` ones, [K] bool, the first half only, the first quarter, and so on."""
    place = new.cumsum(0)  # [K] int64, of a new entry among the new ones, from 1
    shares = [int(place[-1])]
    while settings.nested and shares[-1] > 1:
        shares.append(shares[-1] // 2)
    return torch.stack([~new | (place <= share) for share in shares])


def _prior(examples: Sequence[Example], entries: Sequence[EntryRecord], settings: RefinedSettings) -> Tensor:
    """[n, K] float32: 0 for the entries of an example's task, -inf for others, and for an entry made of itself.

    Without a gate the entries of other tasks compete as well. Where it is the only entry, the one made of an example
    is all that it can retrieve.
    """
    every = settings.gate == "none"
    reachable = np.array([[every or one.task == entry.task for entry in entries] for one in examples])  # [n, K] bool
    itself = np.array([[example.source_digest == entry.source_digest for entry in entries] for example in examples])
    others = reachable & ~itself
    wanted = np.where(others.any(axis=1, keepdims=True), others, reachable)
    return torch.zeros(wanted.shape).masked_fill(torch.from_numpy(~wanted), -math.inf)
