"""One task's update by the refined recipe: fit the gate, train the new task's entries, join them to the earlier ones.

Every task has its own entries, which its questions reach through a relevance gate. The new task's are trained alone, as
a server uses them; entries of earlier tasks do not change, to the bit. Nothing is trained for a task whose examples
answer every validation question as facts.

All tasks share the calibration of merged memory: it is trained with the first task, and kept. Decoupled memory has
none.
"""

from typing import Any

import torch

from inducekv_vllm.bundle import ENTRY_AXES, Bundle, EntryRecord

from ..backbone.model import Backbone
from ..backbone.scoring import EVALUATION_BATCHES, Scorer
from ..backbone.tiled_attention import tiled_attention
from ..gate.fit import FittedGate, fit_gate
from ..gate.settings import GateOptions
from ..runtime.running import ALONE, Run
from ..update.facts import facts_that_suffice, with_facts_that_help
from ..update.inputs import TaskInputs
from ..update.result import UpdateResult
from ..update.settings import REFINED
from .candidates import Search, search
from .checks import check_model, own_questions
from .entries import initial_entries, questions_of
from .report import report_update
from .settings import RefinedSettings
from .training import TrainingProblem, log_prior


def update_refined(backbone: Backbone, inputs: TaskInputs, settings: RefinedSettings, run: Run = ALONE) -> UpdateResult:
    """Choose, train and gate what `checks.check_tasks` has let through. Raises as `Recipe.update` does."""
    scorer = Scorer(backbone, batch_size=EVALUATION_BATCHES * settings.batch_size)
    settings = check_model(scorer, inputs, settings, run.progress)
    with torch.autocast(backbone.device.type, torch.bfloat16, enabled=settings.precision == "bfloat16"):
        training = questions_of(backbone, inputs.training, settings, progress=run.progress)
        validation = questions_of(backbone, inputs.validation, settings, progress=run.progress)
    entries, records = initial_entries(backbone, inputs, settings)
    questions = inputs.others.of(own_questions(inputs))
    fitted = fit_gate(backbone, questions, GateOptions.of(settings), progress=run.progress)
    counts = {"anchors": len(inputs.anchors), **fitted.recorded}
    bundle, facts = None, dict[str, Any]()
    found: Search | None = None
    with tiled_attention(backbone):
        if settings.facts == "search" and settings.form == "decoupled":
            recorded = settings.model_dump() | counts
            bundle, facts = facts_that_suffice(inputs, fitted.gate, recorded, validation, scorer)
        if bundle is None:
            calibrate = settings.form == "merged" and inputs.previous is None
            prior = log_prior(inputs.training, records)
            problem = TrainingProblem(scorer, entries, training, prior, validation, calibrate)
            found = search(problem, settings, fitted.gate.layers[-1], run)
            bundle = _bundle(backbone, inputs.previous, settings, found, records, fitted, counts)
            if settings.facts == "search":
                bundle, facts = with_facts_that_help(bundle, inputs.training, validation, scorer)
        report = report_update(scorer, inputs, validation, bundle, fitted, found, progress=run.progress)
    report |= {"facts": facts}
    for callback in run.callbacks:
        callback.on_end(report)
    return UpdateResult(bundle, report)


def _bundle(
    backbone: Backbone,
    previous: Bundle | None,
    settings: RefinedSettings,
    found: Search,
    records: tuple[EntryRecord, ...],
    fitted: FittedGate,
    counts: dict[str, Any],
) -> Bundle:
    """The previous memory's entries, then those of the new task; `records` are theirs."""
    memory = found.memory
    recorded: dict[str, Any] = {
        "budget": settings.budget,
        "weighting": settings.weighting,
        "form": settings.form,
        "recipe": REFINED,
        "settings": settings.model_dump() | {"learning_rate": found.learning_rate} | counts,
    }
    calibration: dict[str, Any] = {name: getattr(memory, name) for name in ("temperature", "value_gates", "layer_bias")}
    tensors: dict[str, Any] = {name: getattr(memory, name) for name in ENTRY_AXES}
    new = Bundle.create(
        **recorded,
        **calibration,
        **tensors,
        backbone=backbone.fingerprint,
        layers=memory.layers,
        entries=records,
        gate=fitted.gate if previous is None else None,
        activations={records[0].task: found.activation} if settings.form == "decoupled" else {},
    )
    return new if previous is None else previous.join(new, **recorded, gate=fitted.gate)
