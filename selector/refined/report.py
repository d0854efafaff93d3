"""The report of an update by the refined recipe: the content of its `report.json`."""

from collections import Counter
from dataclasses import asdict
from typing import Any

from inducekv_vllm.bundle import Bundle

from ..backbone.bundled_model import BundledModel
from ..backbone.scoring import Questions, Scorer
from ..gate.fit import FittedGate
from ..update.answers import MOST_BASE, answers_of, shares, some
from ..update.inputs import TaskInputs
from ..update.measures import calibration_report, composition, memory_bytes
from ..update.settings import REFINED
from .candidates import Candidate, Search


def report_update(
    scorer: Scorer,
    inputs: TaskInputs,
    validation: Questions,
    bundle: Bundle,
    fitted: FittedGate,
    found: Search | None,
    *,
    progress: bool = False,
) -> dict[str, Any]:
    """Losses and accuracy with the bundle and without, gate openings, and the training's history, if there was one."""
    with_bundle, without = BundledModel(scorer, bundle), BundledModel(scorer, None)
    report: dict[str, Any] = {
        "recipe": REFINED,
        "model": scorer.backbone.model.config.name_or_path,
        "digest": bundle.digest,
        "parent_digest": bundle.metadata.parent_digest,
        "settings": bundle.metadata.settings,
        "pool": {
            "training_examples": len(inputs.training),
            "candidates": len(inputs.training),
            "from_previous": sum(inputs.entries_by_task.values()),
            "validation_examples": len(inputs.validation),
            "anchors": len(inputs.anchors),
            "base_questions": len(inputs.others.base),
            "background_requests": len(inputs.others.background),
        },
        "refinement": {"history": [asdict(record) for record in found.history] if found is not None else []},
        "activation": {
            "chosen": found.activation if found is not None else None,
            "first_layer": found.first_layer if found is not None else None,
            "search": [] if found is None else [_of_candidate(each) for each in found.begun if len(each.losses)],
        },
        "calibration": calibration_report(bundle),
        "composition": {"before": inputs.entries_by_task, "after": composition(bundle.metadata.entries)},
        "gate": {
            "tasks": list(fitted.gate.tasks),
            "thresholds": fitted.gate.thresholds.tolist(),
            "misses": fitted.misses,
            "warnings": list(fitted.warnings),
            "prices": [asdict(price) for price in fitted.prices],
        },
        "memory_bytes": memory_bytes(bundle),
        "validation_nll": None,
        "validation_accuracy": None,
        "base_accuracy": None,
        "answers": None,
    }
    if inputs.validation:
        report["validation_nll"] = {
            "no_memory": without.mean_loss(inputs.validation, validation.keys),
            "deployed": with_bundle.mean_loss(inputs.validation, validation.keys),
        }
        answers = answers_of(with_bundle, without, inputs.validation, progress=progress)
        (_, most), *_ = Counter(example.answer for example in inputs.validation).most_common(1)
        guessing = {"most_frequent_answer": most / len(inputs.validation)}
        report |= {"validation_accuracy": shares(answers) | guessing, "answers": some(answers)}
    if inputs.others.base:
        asked = inputs.others.base[:MOST_BASE]
        answers = answers_of(with_bundle, without, asked, progress=progress)
        report["base_accuracy"] = shares(answers) | {"questions": len(asked)}
    return report


def _of_candidate(candidate: Candidate) -> dict[str, Any]:
    """Its losses are those when it was compared last with others."""
    return {
        "activation": candidate.activation,
        "first_layer": candidate.first_layer,
        "learning_rate": candidate.training.learning_rate,
        "steps": candidate.training.step,
        "nll": candidate.mean_loss,
    }
