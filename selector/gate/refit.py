"""Fit the rule of a gate again, for the traffic that a server has seen; what the gate looks at stays as it is.

Shapes: C tasks, H evidence of a question, n questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from inducekv_vllm.bundle import Gate

from ..backbone.model import Backbone
from ..backbone.token_values import evidence_in, token_values
from ..data.examples import Example
from .encoding import encode_questions
from .fit import FittedGate, check_questions
from .fitting_set import FOLDS, fitting_set
from .settings import DEFAULT_MISSES
from .training import refit_rule


def refit_gate(
    backbone: Backbone,
    gate: Gate,
    own: Mapping[str, Sequence[Example]],
    base: Sequence[Example],
    traffic: Tensor,
    *,
    background: Sequence[Example] = (),
    misses: float = DEFAULT_MISSES,
    seed: int = 0,
) -> FittedGate:
    """The gate with new weights and thresholds; arguments and errors as of `fit_gate`.

    Args:
        own: by task, in the order of the gate's tasks.
        traffic: the evidence [n, H] of requests that need no memory; a fifth of them is held out.
    """
    check_questions(own, background)
    questions = fitting_set(own, base, background=background, pictures=backbone.kind != "text", seed=seed)
    values = token_values(backbone, encode_questions(backbone, questions), gate.layers, gate.marks)
    seen = len(traffic)
    weights, thresholds, near, prices = refit_rule(
        torch.cat([evidence_in(gate, values), traffic]),  # [n, H]
        labels=[len(gate.tasks) if q.task is None else gate.tasks.index(q.task) for q in questions]
        + [len(gate.tasks)] * seen,
        held_out=[q.part == "held_out" for q in questions] + [row % FOLDS == FOLDS - 1 for row in range(seen)],
        kinds=[q.kind for q in questions] + ["traffic"] * seen,
        num_tasks=len(gate.tasks),
        num_prototypes=gate.prototypes.shape[1],
        misses=misses,
    )
    return FittedGate(replace(gate, weights=weights, thresholds=thresholds, near=near), prices)
