"""One task's update of the memory by the refined recipe: choose entries, refine them, fit the gate.

Every task has a quota of entries, found through a relevance gate. The arriving task's entries are chosen and trained on
its examples, every half of them to do alone as well; entries of earlier tasks stay as they are, to the bit. Where
quotas shrink, a task's first entries stay. If they were not trained to do alone, they are now trained on its anchors to
answer as all of them did.

The calibration is shared by all tasks, so it is trained with the first one and kept (`calibrate="first"`), or trained
every time with all anchors in the loss (`calibrate="every"`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from inducekv_vllm.bundle import Bundle, EntryRecord, Gate
from inducekv_vllm.errors import BundleError, ConfigError, TaskDataError

from ..backbone.extraction import QueryKeysOf, extract_query_keys
from ..backbone.injection import Memory
from ..backbone.model import Backbone
from ..backbone.scoring import MEASURED_AT_ONCE, Scorer
from ..backbone.tiled_attention import induced_attention
from ..data.examples import Example
from ..runtime.checkpoint import Checkpoint
from ..runtime.distributed import is_main
from ..runtime.progress import progress_bar
from ..update.inputs import REFINED as RECIPE
from ..update.inputs import TaskInputs, Update, check_previous, require_context
from ..update.measures import Phases
from .entries import Plan, QueryKeys, arriving_task, plan_entries, starting_memory
from .gate_fit import fit_gate
from .lr_search import require_storable, search, shown
from .quotas import quotas
from .report import report_update
from .settings import RefinedSettings
from .training import refine
from .training_problem import prepare_lesson


def update_refined(
    backbone: Backbone,
    inputs: TaskInputs,
    settings: RefinedSettings,
    checkpoint: Checkpoint,
    *,
    base: Sequence[Example] = (),
    query_keys: QueryKeysOf = extract_query_keys,
    progress: bool = False,
) -> Update:
    """Choose, refine and gate; the same inputs and settings give the same digest, interrupted or not. Collective.

    Args:
        base: questions that the model answers well by itself, for which the gate is to stay closed; their answers are
            not used.
        query_keys: for a caller that has the keys of some questions already.

    Raises:
        TaskDataError: an example is too long for the model or already in the memory, or a loss is not finite.
        BundleError, FingerprintMismatch: the previous memory does not fit the model, the payload size or the recipe.
        ConfigError: the settings contradict the previous memory, or there is nothing to search with.
    """
    phases, scorer = Phases(), Scorer(backbone, batch_size=MEASURED_AT_ONCE * settings.batch_size)
    check_inputs(backbone, inputs, settings)
    with phases.phase("check"):
        require_context(scorer, (*inputs.training, *inputs.validation, *inputs.anchors, *base), progress)
    with phases.phase("extract"):
        known = QueryKeys(
            *(
                query_keys(backbone, examples, batch_size=settings.batch_size, progress=progress)
                for examples in (inputs.training, inputs.validation, inputs.anchors, base)
            )
        )
        plan = plan_entries(inputs, settings, known)
        start, records = starting_memory(backbone, inputs, settings, plan)
    with phases.phase("refine"), induced_attention(backbone):
        lesson = prepare_lesson(scorer, inputs, settings, known, plan, start, records)
        trials = search(lesson, inputs, known, settings, checkpoint, progress)
        best = min(trials, key=lambda trial: math.inf if trial.validation_nll is None else trial.validation_nll)
        with progress_bar("Refining", settings.steps, progress and is_main()) as advance:
            state = refine(
                lesson,
                settings.refinement(best.learning_rate),
                checkpoint,
                "refinement",
                start=best.state,
                after_step=lambda state: advance(state.step, shown(state)),
            )
    with phases.phase("gate"):
        gate = None
        if settings.gate != "none":
            gate = fit_gate(_own_keys(inputs, known, plan), known.base, prefix_only=settings.gate == "prefix")
        bundle = _bundle(backbone, inputs, settings, best.learning_rate, records, state.memory(lesson), gate, len(base))
    with phases.phase("measure"), induced_attention(backbone):
        report = report_update(scorer, inputs, known, base, bundle, state, trials, plan)
    return Update(bundle, report | {"phases": phases.records}, known.training[:, 0].contiguous())


def check_inputs(backbone: Backbone, inputs: TaskInputs, settings: RefinedSettings) -> None:
    """Refuse examples and a previous memory that the recipe cannot go on from."""
    check_previous(backbone, inputs, settings.budget, settings.payload_tokens, RECIPE)
    check_tasks(inputs, settings)


def check_tasks(inputs: TaskInputs, settings: RefinedSettings) -> None:
    """The part of it that needs no model."""
    task = arriving_task(inputs.training)
    for example in inputs.validation:
        if example.task != task:
            raise TaskDataError(f"validation example {example.id!r} is of the task {example.task!r}, expected {task!r}")
    if task in inputs.held:
        raise TaskDataError(f"the previous bundle already holds the task {task!r}: a task is refined once")
    if missing := sorted(inputs.held.keys() - {anchor.task for anchor in inputs.anchors}):
        raise ConfigError(
            f"there are no anchors of the task {missing[0]!r}, which the previous bundle holds: "
            "the gate is fitted to anchors of every task; give the store that its run has written"
        )
    if inputs.previous is None and inputs.anchors:
        raise ConfigError(
            f"the store holds anchors of the task {inputs.anchors[0].task!r}, but there is no previous bundle: "
            "name it, or a store of its own for this stream"
        )
    known = inputs.previous.metadata if inputs.previous is not None else None
    if known is not None and known.recipe == RECIPE and known.weighting != settings.weighting:
        raise BundleError(
            f"the previous bundle was refined for the weighting {known.weighting!r}, "
            f"found {settings.weighting!r} in the settings"
        )
    if settings.allocation == "quotas":
        quotas(inputs.held, task, budget=settings.budget, entries_per_task=settings.entries_per_task)
    if settings.learning_rate is None and not inputs.validation:
        raise ConfigError("the learning rate is searched on validation examples, and there are none: give it, or some")


def _own_keys(inputs: TaskInputs, known: QueryKeys, plan: Plan) -> dict[str, Tensor]:
    """Query keys [n, 2, d] by task: anchors of earlier ones, training and validation examples of the arriving one."""
    arriving = arriving_task(inputs.training)
    by_task = {
        task: known.anchors[[a.task == task for a in inputs.anchors]] for task in plan.shares if task != arriving
    }
    return by_task | {arriving: torch.cat([known.training, known.validation])}


def _bundle(
    backbone: Backbone,
    inputs: TaskInputs,
    settings: RefinedSettings,
    learning_rate: float,
    records: tuple[EntryRecord, ...],
    memory: Memory,
    gate: Gate | None,
    base_questions: int,
) -> Bundle:
    require_storable(memory)
    return Bundle.create(
        retrieval_keys=memory.retrieval_keys,
        payload_keys=memory.payload_keys,
        payload_values=memory.payload_values,
        temperature=memory.temperature,
        value_gates=memory.value_gates,
        layer_bias=memory.layer_bias,
        backbone=backbone.fingerprint,
        budget=settings.budget,
        entries=records,
        weighting=settings.weighting,
        recipe=RECIPE,
        settings=asdict(settings)
        | {"learning_rate": learning_rate, "anchors": len(inputs.anchors), "base_questions": base_questions},
        parent_digest=None if inputs.previous is None else inputs.previous.digest,
        gate=gate,
    )
