"""What a recipe is: how a task's examples, or a document, become the next bundle.

Each has a folder, whose module `recipe` has it as an object; `selector.recipes` lists them, and what runs them knows
none by name. Their methods import the rest of the folder when they are called: a command's help waits for no model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from inducekv_vllm.bundle import Bundle

from ..runtime.settings import Settings

if TYPE_CHECKING:
    from ..backbone.model import Backbone
    from ..backbone.scoring import Scorer
    from ..runtime.running import Run
    from .inputs import TaskInputs
    from .result import UpdateResult

S = TypeVar("S", bound=Settings)
Input = Literal["task", "document", "validation", "anchors", "base", "background", "near_misses"]


class Recipe(ABC, Generic[S]):
    name: ClassVar[str]  # as bundles record it
    settings: type[S]  # with a seed, among others
    takes: ClassVar[frozenset[Input]]  # what may be given to it
    continues: ClassVar[frozenset[str]]  # the recipes whose memories it can go on from
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # settings by the name that a user gives them together
    needs_anchors: ClassVar[bool] = False  # of all tasks before, to learn a later one

    def inherited(self, previous: Bundle, given: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that a memory takes over from the one before, unless they are given."""
        return {"budget": previous.metadata.budget}

    def check_model(self, model: str | Path) -> None:
        """Refuse a model by its configuration, before it is loaded. Raises UnsupportedModel."""

    @abstractmethod
    def check(self, inputs: TaskInputs, settings: S) -> None:
        """Refuse what can be refused without the model. Raises ConfigError, TaskDataError, BundleError."""

    @abstractmethod
    def update(self, backbone: Backbone, inputs: TaskInputs, settings: S, run: Run) -> UpdateResult:
        """Learn what was checked; the same inputs and settings give the same tensors, interrupted or not.

        Raises:
            TaskDataError: an example is too long for the model or already in the memory, or a loss is not finite.
            BundleError, FingerprintMismatch: the previous memory does not fit the model or the settings.
            ConfigError: the settings contradict the model or the previous memory.
            UnsupportedModel: the model has no attention that such memory can act on.
        """

    @abstractmethod
    def costs(self, scorer: Scorer, inputs: TaskInputs, settings: S) -> dict[str, str]:
        """What an update would take, by name. Raises what the update itself would raise before it computes anything."""
