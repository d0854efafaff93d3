"""Teaching from Python: what `inducekv-select` and `inducekv-bundle eval` do, with data in memory or in files.

    rows = [{"prompt": "My order has not arrived.", "answer": "shipping"}, ...]
    taught = selector.teach("DIR", rows, task="support", output="support.safetensors")
    print(selector.evaluate("DIR", taught.bundle, "test.csv"))

The tensors are the command's, to the bit.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from inducekv_vllm.bundle import Bundle, read_bundle, write_bundle
from inducekv_vllm.errors import TaskDataError

from .backbone.model import Backbone
from .data.choice import ANCHORS_PER_TASK, choose_anchors, hold_out
from .data.examples import Example, examples_of, read_task
from .data.notes import TaskDataWarning
from .data.records import BY_NAME, Columns
from .data.repeats import distinct
from .data.rows import given_rows
from .gate.background import read_background
from .refined.settings import RefinedSettings
from .refined.update import update_refined
from .report.files import write_report
from .runtime.callback import Callback
from .runtime.checkpoint import Checkpoint
from .update.accuracy import Accuracy, accuracies_of
from .update.inputs import TaskInputs
from .update.result import helps

__all__ = ["Accuracy", "Callback", "Columns", "Data", "TaskDataWarning", "Taught", "evaluate", "read", "teach"]

Data = str | Path | Iterable[Mapping[str, Any] | Example]


@dataclass(frozen=True)
class Taught:
    """What was learned."""

    bundle: Bundle
    report: dict[str, Any]  # as in the command's report.json
    anchors: tuple[Example, ...]  # of all tasks so far: give them to the next task

    @property
    def helps(self) -> bool:
        """Whether the memory has a smaller loss on the validation examples than none."""
        return helps(self.report)


def teach(
    model: str | Path | Backbone,
    examples: Data,
    *,
    task: str | None = None,
    validation: Data | None = None,
    base: Data = (),
    background: str | Path | None = None,
    previous: Taught | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    columns: Columns = BY_NAME,
    output: str | Path | None = None,
    **settings: Any,
) -> Taught:
    """Learn one task by the refined recipe, after those of `previous`.

    Args:
        model: a folder, a Hugging Face id, or a loaded `Backbone`, which several calls can share.
        examples: a file of task data in any format, or rows with the same keys as there; pictures of rows are paths
            beneath the working folder.
        task: the name of the task; default: each row's own, else the file's name.
        validation: of the same task; default: a tenth of the examples.
        base: questions that the model answers well by itself, for which the gate should stay closed.
        background: a file of requests that need no memory, besides those of the package.
        progress: show bars on standard error.
        callbacks: are told of each step of a training, and of the end.
        columns: which columns hold prompt, answer and picture, where their names do not say so.
        output: write the bundle there, and its report beside it as NAME.report.json and NAME.report.html.
        settings: of `RefinedSettings`: budget, steps, activation, learning_rate, ...

    Issues a TaskDataWarning for columns that are not used, rows that are not to be learned, and rows that repeat or
    contradict each other.

    Raises:
        TaskDataError: an example is wrong, too long for the model or already learned, or a loss is not finite.
        ConfigError: a setting is unknown or out of range, or contradicts the model or the previous memory.
        UnsupportedModel: the model cannot be loaded, or has no attention that memory can act on.
        BundleError: the bundle cannot be written.
    """
    given = {"budget": previous.bundle.metadata.budget} if previous else {}
    chosen = RefinedSettings(**{**given, **settings})
    backbone = model if isinstance(model, Backbone) else Backbone.load(model)
    training, held_out = _split(distinct(read(examples, task, columns)), validation, task, columns, chosen.seed)
    inputs = TaskInputs(training, held_out, previous.anchors if previous else (), previous.bundle if previous else None)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, _ = Checkpoint.open(Path(folder) / "progress", {})
        result = update_refined(
            *(backbone, inputs, chosen, checkpoint),
            base=read(base, columns=columns),
            background=read_background(Path(background)) if background else (),
            progress=progress,
            callbacks=callbacks,
        )
    if output is not None:
        write_bundle(result.bundle, Path(output))
        write_report(Path(output), result.report)
    kept = _anchors(training, chosen.seed, result.training_keys)
    return Taught(result.bundle, result.report, (*inputs.anchors, *kept))


def evaluate(
    model: str | Path | Backbone,
    bundle: Bundle | str | Path,
    questions: Data,
    *,
    columns: Columns = BY_NAME,
    max_tokens: int = 64,
) -> list[Accuracy]:
    """How many questions are answered right with a bundle and without, by task; greedy, in transformers.

    Args:
        bundle: one that is loaded, or its file.

    Raises:
        TaskDataError: a question is wrong.
        BundleError: the file is missing or damaged.
        FingerprintMismatch: the bundle was made for another model.
    """
    backbone = model if isinstance(model, Backbone) else Backbone.load(model)
    read_in = bundle if isinstance(bundle, Bundle) else read_bundle(Path(bundle))
    return accuracies_of(backbone, read_in, read(questions, columns=columns), max_tokens)


def read(data: Data, task: str | None = None, columns: Columns = BY_NAME) -> list[Example]:
    """Examples of a file or of rows. Raises TaskDataError: a row is wrong, or an id occurs twice."""
    columns = replace(columns, task=task or columns.task)
    if isinstance(data, str | Path):
        return read_task(data, columns)
    rows = list(given_rows(data))
    return examples_of(rows, Path(), columns, "task", "the rows") if rows else []


def _split(
    examples: Sequence[Example], validation: Data | None, task: str | None, columns: Columns, seed: int
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Training and validation examples, as the command splits them."""
    if validation is not None:
        return examples, read(validation, task, columns)
    if len(examples) < 2:
        raise TaskDataError("a tenth of the examples is held out for validation: give two at least, or `validation`")
    return hold_out(examples, seed)


def _anchors(training: Sequence[Example], seed: int, keys: Tensor) -> list[Example]:
    return [training[row] for row in choose_anchors(training, ANCHORS_PER_TASK, "random", seed, keys=keys)]
