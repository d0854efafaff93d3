"""The recipes that there are, and the settings of a run."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from inducekv_vllm.bundle import Bundle

from .document.recipe import DocumentRecipe
from .paper.recipe import PaperRecipe
from .refined.recipe import RefinedRecipe
from .runtime.settings import Settings
from .update.recipe import Input, Recipe

DEFAULT: Final[Recipe[Any]] = RefinedRecipe()  # the better one in benchmarks/research/continual
RECIPES: Final[Mapping[str, Recipe[Any]]] = MappingProxyType(
    {each.name: each for each in (DEFAULT, DocumentRecipe(), PaperRecipe())}
)


def recipes_for(given: Input) -> list[Recipe[Any]]:
    """Those that take this."""
    return [recipe for recipe in RECIPES.values() if given in recipe.takes]


def settings_after(
    previous: Bundle | None, recipe: Recipe[Any], given: Mapping[str, Any], device: str = "cpu"
) -> Settings:
    """The given values, what is taken over from the previous bundle, and defaults for the rest.

    Args:
        device: of the model; on another one than the CPU, trainings are in bfloat16 unless a value says otherwise.

    Raises:
        ConfigError: a setting is unknown, or a value is out of range.
    """
    values = {} if previous is None else recipe.inherited(previous, given)
    if "precision" in recipe.settings.model_fields and device != "cpu":
        values |= {"precision": "bfloat16"}
    made: Settings = recipe.settings(**{**values, **given})
    return made
