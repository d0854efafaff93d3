"""What an update starts from, and the checks that recipes share."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import BundleError, ConfigError, TaskDataError

from ..backbone.scoring import Scorer
from ..data.choice import hold_out
from ..data.document import Document
from ..data.examples import Example
from ..gate.data import NO_QUESTIONS, GateData
from ..runtime.progress import track
from .measures import composition


@dataclass(frozen=True)
class TaskInputs:
    """The data of one update."""

    training: Sequence[Example]  # the candidates; the calibration is fitted to them
    validation: Sequence[Example]  # never candidates
    anchors: Sequence[Example]  # of earlier tasks; may be empty
    previous: Bundle | None
    others: GateData = NO_QUESTIONS  # what a gate is to stay closed for
    documents: Sequence[Document] = ()  # what is learned in place of examples

    @property
    def entries_by_task(self) -> dict[str, int]:
        """The previous memory's number of entries of each task."""
        return composition(self.previous.metadata.entries) if self.previous is not None else {}

    @property
    def earlier_tasks(self) -> tuple[str, ...]:
        """Those of the previous memory: of its gate, some of which may have facts alone, or of its entries."""
        if self.previous is None:
            return ()
        return self.previous.metadata.gate_tasks or tuple(self.entries_by_task)


def divided(
    examples: Sequence[Example], validation: Sequence[Example] | None, seed: int
) -> tuple[Sequence[Example], Sequence[Example]]:
    """Training and validation examples.

    Args:
        validation: None: a tenth of the examples is held out, which the seed chooses.

    Raises:
        TaskDataError: there are too few examples, or a validation example is one of them.
    """
    if not examples:
        raise TaskDataError("the training data holds no examples")
    if validation is None:
        if len(examples) < 2:
            raise TaskDataError(
                "a tenth is held out for validation: expected two examples at least, or validation examples of their "
                f"own, found {len(examples)}"
            )
        return hold_out(examples, seed)
    if not validation:
        raise TaskDataError("the validation data holds no examples")
    digests = {example.source_digest for example in examples}
    for example in validation:
        if example.source_digest in digests:
            raise TaskDataError(f"validation example {example.id!r} is also a training example")
    return examples, validation


def check_answers(inputs: TaskInputs) -> None:
    """Raises TaskDataError: an answer is empty, and would teach the model to say nothing."""
    for example in (*inputs.training, *inputs.validation):
        if not example.answer.strip():
            raise TaskDataError(f"example {example.id!r} of task {example.task!r} has an empty answer")


def check_continued(previous: Bundle | None, by: str, continues: Collection[str]) -> None:
    """Raises BundleError: the recipe of this name cannot continue what made the previous memory."""
    if previous is not None and (made_by := previous.metadata.recipe) not in continues:
        raise BundleError(
            f"the previous bundle was made by the recipe {made_by!r}, which the recipe {by!r} cannot continue"
        )


def check_fit(scorer: Scorer, inputs: TaskInputs, budget: int, payload_tokens: int, progress: bool = False) -> None:
    """Check that the previous memory and all examples fit the model and the settings.

    Raises:
        BundleError, FingerprintMismatch: the previous memory was made for another backbone, or with other payloads.
        ConfigError: it holds more entries than the budget.
        TaskDataError: it holds an entry of a training example, or an example is too long for the model.
    """
    if (previous := inputs.previous) is not None:
        previous.require_backbone(scorer.backbone.fingerprint, "the previous bundle")
        if previous.num_entries and previous.payload_tokens != payload_tokens:
            raise BundleError(
                f"the previous bundle has {previous.payload_tokens} payload tokens an entry, "
                f"found {payload_tokens} in the settings"
            )
        if previous.num_entries > budget:
            raise ConfigError(
                f"the budget of {budget} is below the {previous.num_entries} entries of the previous tasks"
            )
        held = {entry.id for entry in previous.metadata.entries}
        for example in inputs.training:
            if example.id in held:
                raise TaskDataError(
                    f"the id {example.id!r} of task {example.task!r} is already that of an entry of the previous bundle"
                )
    read = (*inputs.training, *inputs.validation, *inputs.anchors, *inputs.others.of_no_task)
    require_context(scorer, read, progress)


def require_context(scorer: Scorer, examples: Sequence[Example], progress: bool) -> None:
    """Check that every example fits into the model's context.

    Raises:
        TaskDataError: naming the example and both lengths.
    """
    for example in track(examples, "Checking examples", progress):
        scorer.require_context(example)
