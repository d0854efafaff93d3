"""The refined recipe, the default: each task has entries of its own, which are trained, behind a relevance gate."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from inducekv_vllm.bundle import Bundle

from ..update.recipe import Recipe
from ..update.settings import REFINED, TAUGHT
from .settings import RefinedSettings

if TYPE_CHECKING:
    from ..backbone.model import Backbone
    from ..backbone.scoring import Scorer
    from ..runtime.running import Run
    from ..update.inputs import TaskInputs
    from ..update.result import UpdateResult


class RefinedRecipe(Recipe[RefinedSettings]):
    name = REFINED
    settings = RefinedSettings
    takes = frozenset({"task", "validation", "anchors", "base", "background", "near_misses"})
    continues = frozenset({REFINED, TAUGHT})
    presets = MappingProxyType(
        {
            "quick": MappingProxyType({"activation": "generation", "learning_rate": 0.1, "steps": 100}),
            "best": MappingProxyType({"steps": 400, "patience": 6}),
        }
    )
    needs_anchors = True

    def inherited(self, previous: Bundle, given: Mapping[str, Any]) -> dict[str, Any]:
        """The budget, and what all entries of a memory have in common."""
        from .shape import sizes_in_settings

        metadata, budget = previous.metadata, super().inherited(previous, given)
        if metadata.recipe != REFINED or given.get("form", metadata.form) != metadata.form:
            return budget
        shared = {name: getattr(metadata, name) for name in ("form", "weighting")}
        shared |= {n: v for n, v in metadata.settings.items() if n == "entries_per_task"}
        sizes = sizes_in_settings(metadata) if metadata.entries else {}  # facts alone have none
        return {**budget, **shared, **sizes}

    def check(self, inputs: TaskInputs, settings: RefinedSettings) -> None:
        from ..gate.data import check_questions
        from .checks import check_tasks, own_questions

        check_tasks(inputs, settings)
        check_questions(inputs.others.of(own_questions(inputs)))

    def update(self, backbone: Backbone, inputs: TaskInputs, settings: RefinedSettings, run: Run) -> UpdateResult:
        from .update import update_refined

        return update_refined(backbone, inputs, settings, run)

    def costs(self, scorer: Scorer, inputs: TaskInputs, settings: RefinedSettings) -> dict[str, str]:
        from .checks import check_model
        from .duration import in_words
        from .estimate import estimate

        settings = check_model(scorer, inputs, settings)
        found = estimate(scorer.backbone, inputs, settings)
        earlier = 0 if inputs.previous is None else inputs.previous.num_entries
        kept = f" beside {earlier} earlier entries" if earlier else ""
        return {
            "memory": f"{found.new_bytes / 1e6:.2f} MB for this task{kept}, and its part of the gate",
            "training": f"{found.trainings} begun, one of {settings.steps} steps finished, at most "
            f"{in_words(found.seconds)}; less if it ends early, or if the examples suffice as facts",
        }
