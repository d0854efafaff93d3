"""One task learned, from its data to the files of its bundle: what `inducekv-select` and `selector.teach` share.

    learn(checked(TaskRequest(...)))

Whatever can be refused without the model is refused by `checked`; `learn` loads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from inducekv_vllm.bundle import Bundle, Record, read_bundle
from inducekv_vllm.errors import InduceKVError

from .backbone.model import Backbone
from .backbone.scoring import Scorer
from .data.anchors import AnchorStore, examples_digest
from .data.choice import ANCHORS_PER_TASK, AnchorPolicy, choose_anchors
from .data.examples import Example
from .data.repeats import distinct
from .document.settings import DocumentSettings
from .document.text import Document
from .document.update import update_document
from .gate.data import NO_QUESTIONS, GateData, check_questions
from .paper.settings import PaperSettings
from .paper.update import grid, update_paper
from .recipes import RECIPES, RecipeSettings
from .refined.checks import check_tasks, own_questions
from .refined.settings import RefinedSettings
from .refined.update import update_refined
from .report.files import write_report
from .runtime.callback import Callback
from .runtime.checkpoint import Checkpoint, identity_digest
from .runtime.files import require_output
from .runtime.progress import note
from .update.inputs import TaskInputs, check_answers, check_recipe, divided
from .update.outputs import KeptAnchors, sole_writer, write_outputs
from .update.result import UpdateResult, helps, with_dates

Outcome = Literal["learned", "written before", "no better"]


@dataclass(frozen=True)
class Anchors:
    """Examples of all tasks, which the next task's gate is fitted to."""

    earlier: Sequence[Example] = ()
    store: AnchorStore | None = None  # the earlier ones are read from there, and this task's are added
    policy: AnchorPolicy = "random"
    count: int = ANCHORS_PER_TASK  # of this task
    replace: bool = False  # whether those in the store that another run has chosen of this task give way


@dataclass(frozen=True)
class TaskRequest:
    """One task to learn."""

    load: Callable[[], Backbone]
    examples: Sequence[Example]
    validation: Sequence[Example] | None  # None: a tenth of the examples, which the seed chooses
    settings: RecipeSettings
    others: GateData = NO_QUESTIONS  # what the gate is to stay closed for
    previous: Bundle | None = None
    anchors: Anchors | None = None  # None: none are read, chosen or kept
    output: Path | None = None  # None: nothing is written
    allow_worse: bool = True  # False: a memory that is no better than none is not written
    # From the start of the run to when new entries count as made and when they expire; None: no dates are recorded.
    dates: Callable[[datetime], tuple[datetime, datetime | None]] | None = None
    # What tells the run from others, beside data and settings. None: no progress is kept.
    identity: Mapping[str, Any] | None = None
    document: Document | None = None  # what is learned in place of examples
    progress: bool = False  # whether it is shown on standard error


@dataclass(frozen=True)
class CheckedTask:
    """A request in which nothing is wrong that can be seen without the model."""

    request: TaskRequest
    inputs: TaskInputs
    identity: dict[str, Any]  # all that determines the result, as JSON values
    run: str  # the run's name


@dataclass(frozen=True)
class Learned:
    """The next memory, and what has become of it."""

    outcome: Outcome  # "written before": by the same run, which was stopped later
    bundle: Bundle
    report: dict[str, Any] = field(default_factory=dict)  # empty if it was written before
    anchors: tuple[Example, ...] = ()  # of this task


def checked(request: TaskRequest) -> CheckedTask:
    """Split the examples, read the anchors, and check everything that needs no model.

    Raises:
        ConfigError, TaskDataError, BundleError: what is wrong.
    """
    if request.output is not None:
        require_output(request.output, folder_is_made=True)
    settings = request.settings
    training: Sequence[Example] = ()
    validation: Sequence[Example] = ()
    if request.document is None:
        training, validation = divided(distinct(request.examples), request.validation, settings.seed)
    identity = {
        **(request.identity or {}),
        "recipe": _recipe_of(settings),
        "settings": settings.model_dump(),
        "base": examples_digest(request.others.base),
        "background": examples_digest(request.others.background),
        "training": examples_digest(training),
        "validation": examples_digest(validation),
        "previous": request.previous.digest if request.previous is not None else None,
    }
    if request.others.near_misses:  # without, a run has the name that it had before there were any
        identity["near_misses"] = examples_digest(request.others.near_misses)
    if any(example.also for example in training):  # likewise
        identity["also"] = [example.also for example in training]
    if request.document is not None:
        identity["document"] = [request.document.name, request.document.digest]
    run = identity_digest(identity)
    anchors = _earlier_anchors(request.anchors, {example.task for example in training}, run)
    inputs = TaskInputs(training, validation, anchors, request.previous, request.others)
    check_answers(inputs)
    if request.document is not None:
        request.document.check_previous(request.previous)
    else:
        check_recipe(request.previous, _recipe_of(settings))
    if isinstance(settings, RefinedSettings):
        check_tasks(inputs, settings)
        check_questions(inputs.others.of(own_questions(inputs)))
    elif isinstance(settings, PaperSettings):
        grid(inputs, settings)
    return CheckedTask(request, inputs, identity | {"anchors": examples_digest(anchors)}, run)


def learn(
    task: CheckedTask, then: Callable[[Learned], None] = lambda learned: None, callbacks: Sequence[Callback] = ()
) -> Learned:
    """Update the memory, choose the task's anchors, and write both; the same request gives the same tensors.

    Args:
        then: shows or publishes what was learned. If it fails, the same run comes here again without computing.
        callbacks: are told of each step of a training, and of the end.

    Raises:
        TaskDataError: an example is too long for the model or already in the memory, or a loss is not finite.
        BundleError, FingerprintMismatch: the previous memory does not fit the model, or the bundle cannot be written.
        ConfigError: the settings contradict the model or the previous memory, or a file cannot be written.
        UnsupportedModel: the model cannot be loaded, or has no attention that memory can act on.
    """
    output = task.request.output
    with sole_writer(output) if output is not None else contextlib.nullcontext():
        learned, checkpoint = _written_before(task) or _update_and_write(task, callbacks)
        then(learned)
        if checkpoint is not None and learned.outcome != "no better":
            checkpoint.remove()
    return learned


def _recipe_of(settings: RecipeSettings) -> str:
    return next(name for name, kind in RECIPES.items() if isinstance(settings, kind))


def _earlier_anchors(anchors: Anchors | None, learnt: Collection[str], run: str) -> Sequence[Example]:
    """Raises ConfigError: another run has kept anchors of the task. TaskDataError: a file is damaged."""
    if anchors is None or anchors.store is None:
        return () if anchors is None else anchors.earlier
    anchors.store.require_new(learnt, run, replace=anchors.replace)
    return anchors.store.read(except_run=run, except_tasks=learnt if anchors.replace else ())


def _progress_folder(task: CheckedTask) -> Path | None:
    output = task.request.output
    return None if output is None or task.request.identity is None else output.with_name(f".{output.name}.progress")


def _written_before(task: CheckedTask) -> tuple[Learned, Checkpoint] | None:
    """The bundle of a run that has written everything but was not cleared away, if there is one."""
    output, folder = task.request.output, _progress_folder(task)
    if output is None or folder is None or (finished := Checkpoint.finished(folder, task.identity)) is None:
        return None
    checkpoint, digest = finished
    if not output.exists() or (bundle := read_bundle(output)).digest != digest:
        return None
    return Learned("written before", bundle), checkpoint


def _update_and_write(task: CheckedTask, callbacks: Sequence[Callback]) -> tuple[Learned, Checkpoint | None]:
    request, folder = task.request, _progress_folder(task)
    backbone = request.load()
    checkpoint, began = None, datetime.now(UTC).replace(microsecond=0)
    if folder is not None:
        checkpoint, resumed = Checkpoint.open(folder, task.identity)
        began = checkpoint.began
        if resumed and request.progress:
            note("resuming an earlier run")
    try:
        result = _updated(backbone, task, checkpoint, callbacks)
    except InduceKVError:
        if checkpoint is not None:
            checkpoint.remove_unless_begun()  # examples that do not fit the model are found before there is progress
        raise
    if request.dates is not None:
        bundle = with_dates(result.bundle, _kept_records(request), *request.dates(began))
        result = replace(result, bundle=bundle, report=result.report | {"digest": bundle.digest})
    if not (request.allow_worse or helps(result.report)):
        if request.output is not None:
            write_report(request.output, result.report)
        return Learned("no better", result.bundle, result.report), checkpoint
    anchors = _chosen_anchors(backbone, task, result)
    if request.output is not None:
        write_outputs(request.output, result, _kept(task, anchors), request.settings.seed)
    if checkpoint is not None:
        checkpoint.finish(result.bundle.digest)
    return Learned("learned", result.bundle, result.report, anchors), checkpoint


def _kept_records(request: TaskRequest) -> set[Record]:
    """Of the previous memory. A document's entry is always made anew, whatever its id."""
    if request.previous is None:
        return set()
    metadata = request.previous.metadata
    return {*metadata.facts, *(metadata.entries if request.document is None else ())}


def _updated(
    backbone: Backbone, task: CheckedTask, checkpoint: Checkpoint | None, callbacks: Sequence[Callback]
) -> UpdateResult:
    inputs, settings, progress = task.inputs, task.request.settings, task.request.progress
    document = task.request.document
    if isinstance(settings, DocumentSettings):
        assert document is not None
        return update_document(backbone, document, settings, inputs, checkpoint, progress=progress, callbacks=callbacks)
    if isinstance(settings, RefinedSettings):
        return update_refined(backbone, inputs, settings, checkpoint, progress=progress, callbacks=callbacks)
    return update_paper(backbone, inputs, settings, checkpoint, progress=progress)


def _chosen_anchors(backbone: Backbone, task: CheckedTask, result: UpdateResult) -> tuple[Example, ...]:
    anchors, settings, training = task.request.anchors, task.request.settings, task.inputs.training
    if anchors is None:
        return ()
    losses: list[float] = []
    if anchors.policy == "hard":
        losses = Scorer(backbone, batch_size=settings.batch_size).untouched_losses(training)
    rows = choose_anchors(
        training, anchors.count, anchors.policy, settings.seed, keys=result.training_keys, losses=losses
    )
    return tuple(training[row] for row in rows)


def _kept(task: CheckedTask, chosen: Sequence[Example]) -> KeptAnchors | None:
    anchors = task.request.anchors
    if anchors is None or anchors.store is None:
        return None
    return KeptAnchors(anchors.store, chosen, anchors.policy, task.run, anchors.replace)
