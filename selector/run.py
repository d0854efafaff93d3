"""One task learned, from its data to the files of its bundle: what `inducekv-select` and `selector.teach` share.

    learn(checked(TaskRequest(...)))

Whatever can be refused without the model is refused by `checked`; `learn` loads it.
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from inducekv_vllm.bundle import Bundle, Record
from inducekv_vllm.errors import ConfigError, InduceKVError

from .backbone.model import Backbone
from .data.anchors import AnchorStore, examples_digest
from .data.choice import ANCHORS_PER_TASK, choose_anchors
from .data.document import Document
from .data.examples import Example
from .data.repeats import distinct
from .gate.data import NO_QUESTIONS, GateData
from .runtime.checkpoint import Checkpoint
from .runtime.files import require_output
from .runtime.progress import note
from .runtime.running import Callback, Run
from .update.inputs import TaskInputs, check_answers, check_continued, divided
from .update.outputs import sole_writer, write_outputs, write_report
from .update.recipe import Recipe
from .update.result import helps, with_dates

Outcome = Literal["learned", "no better"]


@dataclass(frozen=True)
class Anchors:
    """Examples of all tasks, which the next task's gate is fitted to."""

    earlier: Sequence[Example] = ()
    store: AnchorStore | None = None  # the earlier ones are read from there, and this task's are added
    count: int = ANCHORS_PER_TASK  # of this task


@dataclass(frozen=True)
class TaskRequest:
    """One task, or documents, to learn."""

    load: Callable[[], Backbone]
    recipe: Recipe[Any]
    settings: Any  # of the recipe
    examples: Sequence[Example] = ()
    validation: Sequence[Example] | None = None  # None: a tenth of the examples, which the seed chooses
    documents: Sequence[Document] = ()  # what is learned in place of examples
    others: GateData = NO_QUESTIONS  # what the gate is to stay closed for
    previous: Bundle | None = None
    anchors: Anchors | None = None  # None: none are read, chosen or kept
    output: Path | None = None  # None: nothing is written
    allow_worse: bool = True  # False: a memory that is no better than none is not written
    # From the start of the run to when new entries count as made and when they expire; None: no dates are recorded.
    dates: Callable[[datetime], tuple[datetime, datetime | None]] | None = None
    # What tells the run from others, beside data and settings. None: no progress is kept.
    identity: Mapping[str, Any] | None = None
    progress: bool = False  # whether it is shown on standard error


@dataclass(frozen=True)
class CheckedTask:
    """A request in which nothing is wrong that can be seen without the model."""

    request: TaskRequest
    inputs: TaskInputs
    identity: dict[str, Any]  # all that determines the result, as JSON values


@dataclass(frozen=True)
class Learned:
    """The next memory, and what has become of it."""

    outcome: Outcome
    bundle: Bundle
    report: dict[str, Any]
    anchors: tuple[Example, ...] = ()  # of this task


def checked(request: TaskRequest) -> CheckedTask:
    """Split the examples, read the anchors, and check everything that needs no model.

    Raises:
        ConfigError, TaskDataError, BundleError: what is wrong.
    """
    if request.output is not None:
        require_output(request.output, folder_is_made=True)
    recipe, settings, others = request.recipe, request.settings, request.others
    training: Sequence[Example] = ()
    validation: Sequence[Example] = ()
    if not request.documents:
        training, validation = divided(distinct(request.examples), request.validation, settings.seed)
    identity = {
        **(request.identity or {}),
        "recipe": recipe.name,
        "settings": settings.model_dump(),
        "base": examples_digest(others.base),
        "background": examples_digest(others.background),
        "near_misses": examples_digest(others.near_misses),
        "training": examples_digest(training),
        "also": [example.also for example in training],
        "validation": examples_digest(validation),
        "documents": [[document.name, document.digest] for document in request.documents],
        "previous": None if request.previous is None else request.previous.digest,
    }
    learnt = {example.task for example in training}
    anchors = _earlier_anchors(request.anchors, learnt)
    inputs = TaskInputs(training, validation, anchors, request.previous, others, request.documents)
    check_answers(inputs)
    check_continued(request.previous, recipe.name, recipe.continues)
    recipe.check(inputs, settings)
    _require_new_anchors(request, learnt)
    return CheckedTask(request, inputs, identity | {"anchors": examples_digest(anchors)})


def learn(
    task: CheckedTask, then: Callable[[Learned], None] = lambda learned: None, callbacks: Sequence[Callback] = ()
) -> Learned:
    """Update the memory, choose the task's anchors, and write both; the same request gives the same tensors.

    Args:
        then: shows or publishes what was learned.
        callbacks: are told of each step of a training, and of the end.

    Raises:
        TaskDataError: an example is too long for the model or already in the memory, or a loss is not finite.
        BundleError, FingerprintMismatch: the previous memory does not fit the model, or the bundle cannot be written.
        ConfigError: the settings contradict the model or the previous memory, or a file cannot be written.
        UnsupportedModel: the model cannot be loaded, or has no attention that memory can act on.
    """
    output = task.request.output
    with sole_writer(output) if output is not None else contextlib.nullcontext():
        learned = _update_and_write(task, callbacks)
        then(learned)
    return learned


def _earlier_anchors(anchors: Anchors | None, learnt: Collection[str]) -> Sequence[Example]:
    """Raises ConfigError, TaskDataError: as `AnchorStore` does."""
    if anchors is None or anchors.store is None:
        return () if anchors is None else anchors.earlier
    anchors.store.require_together(learnt)
    return anchors.store.read(except_tasks=learnt)


def _require_new_anchors(request: TaskRequest, learnt: Set[str]) -> None:
    """Raises ConfigError: anchors of a task would be lost that the previous memory goes on with."""
    store = None if request.anchors is None else request.anchors.store
    if store is None or request.previous is None:
        return
    stored = {name for task in store.tasks() for name in task.tasks}
    if again := sorted(learnt & stored & set(request.previous.metadata.tasks)):
        raise ConfigError(
            f"{store.folder} has anchors of the task {again[0]!r}, which the previous bundle holds: give another name "
            "(--task-name)"
        )


def _update_and_write(task: CheckedTask, callbacks: Sequence[Callback]) -> Learned:
    request, output = task.request, task.request.output
    backbone = request.load()
    checkpoint, began = None, datetime.now(UTC).replace(microsecond=0)
    if output is not None and request.identity is not None:
        checkpoint, resumed = Checkpoint.open(output.with_name(f".{output.name}.progress"), task.identity)
        began = checkpoint.began
        if resumed and request.progress:
            note("resuming an earlier run")
    try:
        run = Run(checkpoint, request.progress, callbacks)
        result = request.recipe.update(backbone, task.inputs, request.settings, run)
    except InduceKVError:
        if checkpoint is not None:
            checkpoint.remove_unless_begun()  # examples that do not fit the model are found before there is progress
        raise
    if request.dates is not None:
        bundle = with_dates(result.bundle, _kept_records(request), *request.dates(began))
        result = replace(result, bundle=bundle, report=result.report | {"digest": bundle.digest})
    if not (request.allow_worse or helps(result.report)):
        if output is not None:
            write_report(output, result.report)
        return Learned("no better", result.bundle, result.report)
    anchors = _chosen_anchors(task)
    if output is not None:
        write_outputs(output, result, None if request.anchors is None else request.anchors.store, anchors)
    if checkpoint is not None:
        checkpoint.remove()
    return Learned("learned", result.bundle, result.report, anchors)


def _kept_records(request: TaskRequest) -> set[Record]:
    """Of the previous memory. A document's entry is always made anew, whatever its id."""
    if request.previous is None:
        return set()
    metadata = request.previous.metadata
    return {*metadata.facts, *(() if request.documents else metadata.entries)}


def _chosen_anchors(task: CheckedTask) -> tuple[Example, ...]:
    anchors = task.request.anchors
    chosen = () if anchors is None else choose_anchors(task.inputs.training, anchors.count, task.request.settings.seed)
    return tuple(chosen)
