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
from .classified import refitted
from .encoding import encode_questions
from .fit import FittedGate, check_questions, labelled_questions, seen
from .fitting_set import FOLDS
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
    near_misses: Sequence[Example] = (),
    misses: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> FittedGate:
    """The gate with new weights and thresholds; arguments and errors as of `fit_gate`.

    Args:
        own: by task, in the order of the gate's tasks.
        traffic: the evidence [n, H] of requests that need no memory; a fifth of them is held out.
    """
    check_questions(own, background, near_misses=near_misses)
    by_classifiers = gate.classified > 0
    questions, labels = labelled_questions(
        backbone,
        own,
        base,
        background=background,
        near_misses=near_misses,
        by_classifiers=by_classifiers,
        seed=seed,
    )
    if gate.clause_ends is not None:
        seen_by_them = seen(backbone, questions, gate.layers, gate.clause_ends, progress=progress)
        after, prices, warnings, share = refitted(gate, seen_by_them, questions, torch.tensor(labels), traffic, misses)
        return FittedGate(after, prices, {}, share, warnings)
    share = DEFAULT_MISSES if misses is None else misses
    values = token_values(backbone, encode_questions(backbone, questions), gate.layers, gate.marks, progress=progress)
    weights, thresholds, near, prices = refit_rule(
        torch.cat([evidence_in(gate, values), traffic]),  # [n, H]
        labels=labels + [len(gate.tasks)] * len(traffic),
        held_out=[q.part == "held_out" for q in questions] + [row % FOLDS == FOLDS - 1 for row in range(len(traffic))],
        kinds=[q.kind for q in questions] + ["traffic"] * len(traffic),
        num_tasks=len(gate.tasks),
        num_prototypes=gate.prototypes.shape[1],
        misses=share,
    )
    return FittedGate(replace(gate, weights=weights, thresholds=thresholds, near=near), prices, {}, share)
