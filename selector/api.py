"""Teaching from Python: what `inducekv-select` and `inducekv-bundle eval` do, with data in memory or in files.

    rows = [{"prompt": "My order has not arrived.", "answer": "shipping"}, ...]
    taught = selector.teach("DIR", rows, task="support", output="support.safetensors")
    print(selector.evaluate("DIR", taught.bundle, "test.csv"))

The tensors are the command's, to the bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inducekv_vllm.bundle import Bundle, read_bundle

from .backbone.model import Backbone
from .data.document import Document
from .data.examples import Example
from .data.given import Data, read
from .data.notes import TaskDataWarning
from .data.records import BY_NAME, Columns
from .document.reading import read_documents
from .gate.data import read_others
from .recipes import DEFAULT, recipes_for, settings_after
from .run import Anchors, TaskRequest, checked, learn
from .runtime.running import Callback
from .update.accuracy import Accuracy, accuracies_of
from .update.recipe import Recipe
from .update.result import helps

__all__ = [
    "Accuracy",
    "Callback",
    "Columns",
    "Data",
    "Document",
    "TaskDataWarning",
    "Taught",
    "evaluate",
    "read",
    "teach",
    "teach_document",
]


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
    background: Data = (),
    near_misses: Data = (),
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
        background: requests that need no memory, besides those of the package; a .txt has one a line.
        near_misses: requests that look like those of a task and are not; likewise.
        progress: show bars on standard error.
        callbacks: are told of each step of a training, and of the end.
        columns: which columns hold prompt, answer and picture, where their names do not say so; those of `base` may.
        output: write the bundle there, and its report beside it as NAME.report.json; the folder is made if it does not
            exist.
        settings: of `RefinedSettings`: budget, steps, activation, learning_rate, ...; what all entries of a memory have
            in common is by default that of `previous`.

    Issues a TaskDataWarning for columns that are not used, rows that are not to be learned, and rows that repeat or
    contradict each other.

    Raises:
        TaskDataError: an example is wrong, too long for the model or already learned, a validation example is one of
            the task's, a base question is a task's, or a loss is not finite.
        ConfigError: a setting is unknown or out of range, or contradicts the model or the previous memory; nothing can
            be written to `output`, or another run is writing it.
        UnsupportedModel: the model cannot be loaded, or has no attention that memory can act on.
        BundleError: the bundle cannot be written.
    """
    before = None if previous is None else previous.bundle
    task_to_learn = checked(
        TaskRequest(
            load=lambda: _loaded(model),
            recipe=DEFAULT,
            settings=settings_after(before, DEFAULT, settings, _device_of(model)),
            examples=read(examples, task, columns),
            validation=None if validation is None else read(validation, task, columns),
            others=read_others(base, background, near_misses, columns),
            previous=before,
            anchors=Anchors(previous.anchors if previous is not None else ()),
            output=None if output is None else Path(output),
            progress=progress,
        )
    )
    learned = learn(task_to_learn, callbacks=callbacks)
    return Taught(learned.bundle, learned.report, (*task_to_learn.inputs.anchors, *learned.anchors))


def teach_document(
    model: str | Path | Backbone,
    document: str | Path | Document | Sequence[Document],
    *,
    base: Data = (),
    background: Data = (),
    near_misses: Data = (),
    previous: Taught | Bundle | None = None,
    progress: bool = False,
    callbacks: Sequence[Callback] = (),
    output: str | Path | None = None,
    **settings: Any,
) -> Taught:
    """A bundle that knows documents: a few keys and values of each, fitted to act like all of them.

    Args:
        document: a file of text, Markdown, HTML or PDF, whose name is the title, or a folder of such files; or
            `selector.Document`, one or several. Each is a task of the gate.
        previous: the memory of earlier versions of the same documents.
        settings: of `DocumentSettings`: share, payload_tokens, steps, ...
        base, background, near_misses, progress, callbacks, output: as of `teach`.

    Raises:
        TaskDataError: a document cannot be read or is too short, or nothing can be asked about it.
        ConfigError, UnsupportedModel, BundleError: as of `teach`; the previous memory is none of these documents.
    """
    before = previous.bundle if isinstance(previous, Taught) else previous
    (recipe,) = recipes_for("document")
    if isinstance(document, str | Path):
        document = read_documents(Path(document))
    task = checked(
        TaskRequest(
            load=lambda: _loaded(model, recipe),
            recipe=recipe,
            settings=settings_after(before, recipe, settings, _device_of(model)),
            documents=(document,) if isinstance(document, Document) else document,
            others=read_others(base, background, near_misses),
            previous=before,
            output=None if output is None else Path(output),
            identity=None if output is None else {"model": str(_name_of(model))},
            progress=progress,
        )
    )
    learned = learn(task, callbacks=callbacks)
    return Taught(learned.bundle, learned.report, learned.anchors)


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
    backbone = _loaded(model)
    read_in = bundle if isinstance(bundle, Bundle) else read_bundle(Path(bundle))
    return accuracies_of(backbone, read_in, read(questions, columns=columns), max_tokens)


def _device_of(model: str | Path | Backbone) -> str:
    return str(model.device) if isinstance(model, Backbone) else "cpu"


def _name_of(model: str | Path | Backbone) -> str | Path:
    return model.model.config.name_or_path if isinstance(model, Backbone) else model


def _loaded(model: str | Path | Backbone, recipe: Recipe[Any] = DEFAULT) -> Backbone:
    if isinstance(model, Backbone):
        return model
    recipe.check_model(model)
    return Backbone.load(model)
