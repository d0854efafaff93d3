"""What an update by the refined recipe did, in numbers: the content of its `report.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from inducekv_vllm.bundle import Bundle

from ..backbone.bundled_model import Deployed, openings
from ..backbone.scoring import Scorer
from ..data.examples import Example
from ..update.inputs import REFINED, TaskInputs, memory_bytes
from ..update.measures import composition, diversity
from .entries import Plan, QueryKeys
from .lr_search import Trial
from .training import RefinementState


def report_update(
    scorer: Scorer,
    inputs: TaskInputs,
    known: QueryKeys,
    base: Sequence[Example],
    bundle: Bundle,
    state: RefinementState,
    trials: Sequence[Trial],
    plan: Plan,
) -> dict[str, Any]:
    deployed, plain = Deployed(scorer, bundle), Deployed(scorer, None)
    search = [
        {"learning_rate": one.learning_rate, "validation_nll": one.validation_nll} for one in trials if len(trials) > 1
    ]
    report: dict[str, Any] = {
        "recipe": REFINED,
        "digest": bundle.digest,
        "parent_digest": bundle.metadata.parent_digest,
        "settings": bundle.metadata.settings,
        "pool": {
            "training_examples": len(inputs.training),
            "candidates": len(inputs.training),
            "from_previous": len(plan.kept),
            "validation_examples": len(inputs.validation),
            "anchors": len(inputs.anchors),
            "base_questions": len(base),
        },
        "refinement": {"search": search, "history": [asdict(measured) for measured in state.history]},
        "calibration": {
            "temperature": float(bundle.temperature),
            "value_gates": bundle.value_gates.tolist(),
            "layer_bias": bundle.layer_bias.tolist(),
        },
        "diversity": {"selected": diversity(bundle.retrieval_keys.float())},
        "composition": {"before": inputs.held, "after": composition(bundle.metadata.entries)},
        "gate": None
        if bundle.gate is None
        else {
            "tasks": list(bundle.gate.tasks),
            "thresholds": bundle.gate.thresholds.tolist(),
            "openings": _openings(bundle, inputs, known, base),
        },
        "memory_bytes": memory_bytes(bundle),
        "validation_nll": None,
        "validation_accuracy": None,
    }
    if inputs.validation:
        for name, measure in (("validation_nll", Deployed.mean_loss), ("validation_accuracy", Deployed.accuracy)):
            report[name] = {
                "no_memory": measure(plain, inputs.validation, known.validation),
                "deployed": measure(deployed, inputs.validation, known.validation),
            }
    return report


def _openings(bundle: Bundle, inputs: TaskInputs, known: QueryKeys, base: Sequence[Example]) -> list[dict[str, Any]]:
    """How often the gate opens, by task and kind of example; all of them took part in its fit."""
    found = []
    groups = (("validation", inputs.validation, known.validation), ("anchors", inputs.anchors, known.anchors))
    for split, examples, keys in (*groups, ("base", base, known.base)):
        for task in dict.fromkeys(example.task for example in examples):
            rows = [row for row, example in enumerate(examples) if example.task == task]
            shares = openings(bundle, task, keys[rows])
            found.append(
                {
                    "task": task,
                    "split": split,
                    "questions": len(rows),
                    "opened": shares["opened"],
                    "routed_to_own_task": None if split == "base" else shares["own_task"],
                }
            )
    return found
