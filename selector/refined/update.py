"""One task's update by the refined recipe: fit the gate, train the new task's entries, join them to the earlier ones.

Every task has its own entries, which its questions reach through a relevance gate. The new task's are trained alone, as
a server uses them; entries of earlier tasks do not change, to the bit. Nothing is trained for a task whose examples
answer every validation question as facts.

All tasks share the calibration of merged memory: it is trained with the first task, and kept. Decoupled memory has
none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inducekv_vllm.bundle import ENTRY_AXES, Bundle, EntryRecord

from ..backbone.extraction import extract_keys
from ..backbone.model import Backbone
from ..backbone.scoring import EVALUATION_BATCHES, Questions, Scorer
from ..backbone.tiled_attention import tiled_attention
from ..gate.fit import FittedGate, fit_gate
from ..gate.settings import GateOptions
from ..runtime.callback import Callback
from ..runtime.checkpoint import Checkpoint
from ..runtime.phases import Phases
from ..update.facts import facts_that_suffice, with_facts_that_help
from ..update.inputs import TaskInputs, check_inputs
from ..update.result import UpdateResult
from ..update.settings import REFINED
from .candidates import Search, search
from .checks import check_tasks, own_questions
from .entries import initial_entries, settings_for
from .report import report_update
from .settings import RefinedSettings
from .training import TrainingProblem, log_prior


def update_refined(
    backbone: Backbone,
    inputs: TaskInputs,
    settings: RefinedSettings,
    checkpoint: Checkpoint | None = None,
    *,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
) -> UpdateResult:
    """Choose, train and gate; the same inputs and settings give the same digest, interrupted or not.

    Args:
        checkpoint: keeps the progress; None: nothing is kept.
        callbacks: are told of each step.

    Raises:
        TaskDataError: an example is too long for the model or already in the memory, or a loss is not finite.
        BundleError, FingerprintMismatch: the previous memory does not fit the model, the payload size or the recipe.
        ConfigError: the settings contradict the model or the previous memory, there is nothing to search with, or no
            gate can tell the tasks from each other or from everyday requests.
    """
    phases, scorer = Phases(checkpoint), Scorer(backbone, batch_size=EVALUATION_BATCHES * settings.batch_size)
    with phases.phase("check"):
        check_tasks(inputs, settings)
        settings = settings_for(backbone, settings)
        if settings.form == "merged":
            backbone.require_full_attention()
        check_inputs(scorer, inputs, settings, REFINED, progress)
    with phases.phase("extract"):
        options: dict[str, Any] = {"batch_size": settings.batch_size, "progress": progress}
        training = Questions(inputs.training, extract_keys(backbone, inputs.training, **options))
        validation = Questions(inputs.validation, extract_keys(backbone, inputs.validation, **options))
        entries, records = initial_entries(backbone, inputs, settings, training.keys)
    with phases.phase("gate"):
        questions = inputs.others.of(own_questions(inputs))
        fitted = fit_gate(backbone, questions, GateOptions.of(settings), progress=progress)
    counts = {"anchors": len(inputs.anchors), **fitted.recorded}
    bundle, facts = None, dict[str, Any]()
    found: Search | None = None
    if settings.facts == "search" and settings.form == "decoupled":
        with phases.phase("facts alone"), tiled_attention(backbone):
            recorded = settings.model_dump() | counts
            bundle, facts = facts_that_suffice(inputs, fitted.gate, recorded, validation, scorer)
    if bundle is None:
        with phases.phase("refine"), tiled_attention(backbone):
            calibrate = settings.form == "merged" and inputs.previous is None
            prior = log_prior(inputs.training, records)
            problem = TrainingProblem(scorer, entries, training, prior, validation, calibrate)
            found = search(problem, settings, fitted.gate.layers[-1], checkpoint, progress, callbacks)
            bundle = _bundle(backbone, inputs.previous, settings, found, records, fitted, counts)
        with phases.phase("facts"), tiled_attention(backbone):
            if settings.facts == "search":
                bundle, facts = with_facts_that_help(bundle, inputs.training, validation, scorer)
    with phases.phase("measure"), tiled_attention(backbone):
        report = report_update(scorer, inputs, validation, bundle, fitted, found, progress=progress)
    report |= {"facts": facts, "phases": phases.records}
    for callback in callbacks:
        callback.on_end(report)
    return UpdateResult(bundle, report, training.keys)


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
        entries=records,
        gate=fitted.gate if previous is None else None,
        activations={records[0].task: found.activation} if settings.form == "decoupled" else {},
    )
    return new if previous is None else previous.join(new, **recorded, gate=fitted.gate)
