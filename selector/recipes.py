"""The settings of the recipes, and what a memory's next task takes over from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from inducekv_vllm.bundle import Bundle

from .document.settings import DOCUMENT, DocumentSettings
from .paper.settings import PaperSettings
from .refined.settings import RefinedSettings
from .update.settings import PAPER, REFINED

RecipeSettings = PaperSettings | RefinedSettings | DocumentSettings
RECIPES: Final[dict[str, type[RecipeSettings]]] = {
    PAPER: PaperSettings,
    REFINED: RefinedSettings,
    DOCUMENT: DocumentSettings,
}
DEFAULT_RECIPE: Final = REFINED  # the better one in benchmarks/research/continual


def settings_after(
    previous: Bundle | None, recipe: str, given: Mapping[str, Any], device: str = "cpu"
) -> RecipeSettings:
    """The given values, the previous bundle's budget and form, and defaults for the rest.

    Args:
        device: of the model; on another one than the CPU, trainings are in bfloat16 unless a value says otherwise.

    Raises:
        ConfigError: a setting is unknown, or a value is out of range.
    """
    values = dict(given)
    if recipe != PAPER and device != "cpu":
        values = {"precision": "bfloat16", **values}
    if previous is not None and recipe != DOCUMENT:
        values = {"budget": previous.metadata.budget, **values}
        form = previous.metadata.form
        if recipe == previous.metadata.recipe == REFINED and values.get("form", form) == form:
            # What all entries of a memory have in common.
            shared = {name: getattr(previous.metadata, name) for name in ("form", "weighting", "payload_tokens")}
            shared |= {n: v for n, v in previous.metadata.settings.items() if n == "entries_per_task"}
            shape = previous.metadata.output_map
            values = {**shared, "map_rank": 0 if shape is None else shape.rank, **values}
    return RECIPES[recipe](**values)
