"""One task's update by the refined recipe: choose entries, train them, fit the gate.

Every task has a quota of entries, which its questions reach through a relevance gate. The new task's entries are chosen
and trained on its examples, every half of them also alone; entries of earlier tasks do not change, to the bit. When
quotas shrink, a task keeps its first entries. If those were not trained to work alone, they train on the task's anchors
to answer as all of them did.

All tasks share the calibration: it is trained with the first task and kept (`calibrate="first"`), or trained every time
with all anchors in the loss (`calibrate="every"`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from inducekv_vllm.bundle import Bundle, EntryRecord
from inducekv_vllm.bundle.activation import Activation
from inducekv_vllm.errors import BundleError, ConfigError, TaskDataError

from ..backbone.extraction import extract_keys
from ..backbone.model import Backbone
from ..backbone.scoring import EVALUATION_BATCHES, Questions, Scorer
from ..backbone.tiled_attention import tiled_attention
from ..data.examples import Example
from ..gate.fit import FittedGate, fit_gate
from ..runtime.checkpoint import Checkpoint
from ..runtime.distributed import together
from ..runtime.phases import Phases
from ..update.inputs import TaskInputs, check_answers, check_previous, require_context
from ..update.recipes import REFINED
from ..update.result import UpdateResult
from .candidates import Candidate, activations_by_task, latest_good, train_candidates
from .entries import EntryPlan, check_rank, initial_memory, new_task, plan_entries, quotas
from .report import report_update
from .settings import RefinedSettings
from .training_problem import TaskKeys, TrainingProblem, prepare_problem, questions, trained_anchors


def update_refined(
    backbone: Backbone,
    inputs: TaskInputs,
    settings: RefinedSettings,
    checkpoint: Checkpoint,
    *,
    base: Sequence[Example] = (),
    background: Sequence[Example] = (),
    progress: bool = False,
) -> UpdateResult:
    """Choose, train and gate; the same inputs and settings give the same digest, interrupted or not. Collective.

    Args:
        base: questions that the model answers well by itself, for which the gate should stay closed; their answers are
            not used.
        background: requests that need no memory, besides those of the package.

    Raises:
        TaskDataError: an example is too long for the model or already in the memory, or a loss is not finite.
        BundleError, FingerprintMismatch: the previous memory does not fit the model, the payload size or the recipe.
        ConfigError: the settings contradict the model or the previous memory, there is nothing to search with, or no
            gate can tell the tasks from each other or from everyday requests.
    """
    phases, scorer = Phases(checkpoint), Scorer(backbone, batch_size=EVALUATION_BATCHES * settings.batch_size)
    check_previous(backbone, inputs, settings.budget, settings.payload_tokens, REFINED)
    check_tasks(inputs, settings)
    check_rank(backbone, settings)
    with phases.phase("check"):
        examples = (*inputs.training, *inputs.validation, *inputs.anchors, *base, *background)
        require_context(scorer, examples, progress)
    with phases.phase("extract"):
        options: dict[str, Any] = {"batch_size": settings.batch_size, "progress": progress}
        training = extract_keys(backbone, inputs.training, **options)
        plan = plan_entries(inputs, settings, training)
        others = (inputs.validation, trained_anchors(inputs, settings, plan))
        keys = TaskKeys(training, *(extract_keys(backbone, examples, **options) for examples in others))
        start, records = initial_memory(backbone, inputs, settings, plan)
    with phases.phase("gate"), together():
        fitted = _fit(backbone, inputs, settings, plan, base, background)
    with phases.phase("refine"), tiled_attention(backbone):
        tasks = dict.fromkeys(record.task for record in records)

        def prepare(activation: Activation) -> tuple[TrainingProblem, Questions]:
            activations = activations_by_task(inputs, settings, tasks, activation)
            problem = prepare_problem(scorer, inputs, settings, keys, plan, start, records, activations)
            return problem, questions(scorer, inputs.validation, keys.validation, activations)

        candidates = train_candidates(prepare, settings, checkpoint, progress)
        chosen = latest_good(candidates, len(inputs.validation))
        activations = activations_by_task(inputs, settings, tasks, chosen.activation)
        counts = {"anchors": len(inputs.anchors), "base_questions": len(base), "background_requests": len(background)}
        bundle = _bundle(backbone, inputs, settings, chosen, records, fitted, activations, counts)
    with phases.phase("measure"), tiled_attention(backbone):
        report = report_update(scorer, inputs, keys, base, background, bundle, fitted, candidates, chosen, plan)
    return UpdateResult(bundle, report | {"phases": phases.records}, keys.training)


def check_tasks(inputs: TaskInputs, settings: RefinedSettings) -> None:
    """The checks that need no model.

    Raises:
        TaskDataError: an answer is empty, or the examples belong to several tasks or to one of the previous bundle.
        BundleError: the previous bundle has another form, weighting or rank of maps.
        ConfigError: anchors are missing or superfluous, the budget is too small, or there is nothing to search with.
    """
    check_answers(inputs)
    task = new_task(inputs.training)
    for example in inputs.validation:
        if example.task != task:
            raise TaskDataError(f"validation example {example.id!r} is of the task {example.task!r}, expected {task!r}")
    if task in inputs.entries_by_task:
        raise TaskDataError(
            f"the previous bundle already holds the task {task!r}, and a task is refined once: to learn it "
            f"again, take it out with `inducekv-bundle forget --task {task}`, and give --replace"
        )
    if missing := sorted(inputs.entries_by_task.keys() - {anchor.task for anchor in inputs.anchors}):
        raise ConfigError(
            f"there are no anchors of the task {missing[0]!r}, which the previous bundle holds: "
            "the gate is fitted to anchors of every task; give the store that its run has written"
        )
    if inputs.previous is None and inputs.anchors:
        raise ConfigError(
            f"the store holds anchors of the task {inputs.anchors[0].task!r}, but there is no previous bundle: "
            "name it, or use another store for this stream"
        )
    previous = inputs.previous.metadata if inputs.previous is not None else None
    if previous is not None and previous.recipe == REFINED:
        for name in ("form", "weighting"):
            if getattr(previous, name) != getattr(settings, name):
                raise BundleError(
                    f"the previous bundle was refined for the {name} {getattr(previous, name)!r}, "
                    f"found {getattr(settings, name)!r} in the settings"
                )
        rank = 0 if previous.output_map is None else previous.output_map.rank
        if rank != settings.map_rank:
            raise BundleError(f"the previous bundle has maps of rank {rank}, found {settings.map_rank} in the settings")
    if settings.allocation == "quotas":
        quotas(inputs.entries_by_task, task, budget=settings.budget, entries_per_task=settings.entries_per_task)
    if not inputs.validation:
        if settings.learning_rate is None:
            raise ConfigError(
                "the learning rate is searched on validation examples, and there are none: give it, or some"
            )
        if settings.activation == "search":
            raise ConfigError("the activation is searched on validation examples, and there are none: give it, or some")


def own_questions(inputs: TaskInputs, tasks: Iterable[str]) -> dict[str, list[Example]]:
    """What the gate takes for questions of these tasks: anchors of the earlier ones, all examples of the new one."""
    task = new_task(inputs.training)
    earlier = {old: [anchor for anchor in inputs.anchors if anchor.task == old] for old in tasks if old != task}
    return earlier | {task: [*inputs.training, *inputs.validation]}


def _fit(
    backbone: Backbone,
    inputs: TaskInputs,
    settings: RefinedSettings,
    plan: EntryPlan,
    base: Sequence[Example],
    background: Sequence[Example],
) -> FittedGate | None:
    if settings.gate == "none":
        return None
    own = own_questions(inputs, plan.shares)
    misses, seed = settings.gate_misses, settings.seed
    return fit_gate(backbone, own, base, background=background, misses=misses, seed=seed)


def _bundle(
    backbone: Backbone,
    inputs: TaskInputs,
    settings: RefinedSettings,
    chosen: Candidate,
    records: tuple[EntryRecord, ...],
    fitted: FittedGate | None,
    activations: dict[str, Activation],
    counts: dict[str, int],
) -> Bundle:
    memory = chosen.memory
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
        recipe=REFINED,
        settings=settings.model_dump() | {"learning_rate": chosen.learning_rate} | counts,
        parent_digest=None if inputs.previous is None else inputs.previous.digest,
        gate=None if fitted is None else fitted.gate,
        form=settings.form,
        activations=activations,
        map_in=memory.map_in,
        map_out=memory.map_out,
    )
