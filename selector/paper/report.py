"""The report of an update by the paper's recipe: the content of its `report.json`.

Shapes: N candidates, B selected.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from ..backbone.injection import TensorMemory
from ..backbone.scoring import Questions
from ..update.inputs import TaskInputs
from ..update.measures import calibration_report, composition, memory_bytes
from ..update.settings import PAPER
from .bilevel import SelectionResult
from .objective import Objective, log_prior
from .simplex import effective_entries, support_size


def report_update(
    inputs: TaskInputs,
    objective: Objective,
    validation: Questions,
    results: Sequence[SelectionResult],
    best: SelectionResult,
) -> dict[str, Any]:
    """Rounding and validation loss of the best pair (beta, gamma), and the losses of all pairs."""
    bundle, state, pool = best.bundle, best.state, objective.pool
    selected = state.selected(objective.budget)
    relaxed = objective.memory(state.calibration.phi)
    prior = log_prior(state.weights, objective.budget).float()
    rounded = TensorMemory.from_bundle(bundle)

    report: dict[str, Any] = {
        "recipe": PAPER,
        "digest": bundle.digest,
        "parent_digest": bundle.metadata.parent_digest,
        "settings": bundle.metadata.settings,
        "pool": {
            "training_examples": len(inputs.training),
            "candidates": len(pool),
            "from_previous": pool.num_previous,
            "validation_examples": len(validation),
            "anchors": len(objective.anchors),
        },
        "grid": [
            {"beta": result.beta, "gamma": result.gamma, "validation_nll": result.validation_loss} for result in results
        ],
        "history": [asdict(step) for step in state.history],
        "calibration": calibration_report(bundle),
        "rounding": rounding(state.weights, selected),
        "composition": {"before": inputs.entries_by_task, "after": composition(bundle.metadata.entries)},
        "memory_bytes": memory_bytes(bundle),
        "validation_nll": None,
    }
    if len(validation):
        scorer = objective.scorer
        relaxed_loss = scorer.mean_loss(validation, relaxed, prior)
        bundle_loss = scorer.mean_loss(validation, rounded)
        report["validation_nll"] = {
            "no_memory": scorer.mean_loss(validation),
            "relaxed": relaxed_loss,
            "deployed": bundle_loss,
            "rounding_gap": bundle_loss - relaxed_loss,
        }
    return report


def rounding(weights: Tensor, selected: Tensor) -> dict[str, Any]:
    """How much of the relaxed weights [N] float64 the selected rows [B] int64 keep."""
    B = len(selected)
    return {
        "selected": B,
        "support": support_size(weights),
        "effective_entries": effective_entries(weights),
        "mass_captured": float(weights[selected].sum() / weights.sum()),
        "selected_without_weight": int((weights[selected] == 0).sum()),
        "collapsed": support_size(weights) < B,
    }
