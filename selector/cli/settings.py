"""The settings of `inducekv-select`: its own, and those of the recipes."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.vllm_seams.config import ADMIN_KEY_VARIABLE

from ..client import API_KEY_VARIABLE
from ..data.choice import ANCHORS_PER_TASK
from ..recipes import DEFAULT, RECIPES, recipes_for, settings_after
from ..runtime.settings import Flag, Settings
from ..update.recipe import Input, Recipe
from .columns import ColumnOptions
from .flags import Parser, add_flags, flag_fields, option_of
from .gate_questions import BACKGROUND, NEAR_MISSES

PROGRAM: Final = "inducekv-select"
FIRST: Final = (  # the flags that matter first
    *("model", "task", "document", "output", "validation", "base", "previous", "anchors"),
    *("preset", "dry_run", "publish"),
)
OF: Final[Mapping[str, Input]] = MappingProxyType(  # options that say more of what is given
    {
        **dict.fromkeys(("recipe", "columns"), "task"),
        "anchors_per_task": "anchors",
    }
)


NAMES: Final = [recipe.name for recipe in recipes_for("task")]


class SelectOptions(ColumnOptions):
    """What to read and write."""

    model: Annotated[str, Flag("model folder or Hugging Face id")]
    output: Annotated[Path, Flag("the bundle to write, replaced if it exists; its folder is made")]
    task: Annotated[Path | None, Flag("the task's training data: JSON lines, CSV, TSV, Parquet")] = None
    document: Annotated[
        Path | None, Flag("what to learn in place of a task: text, Markdown, HTML or PDF, or a folder", metavar="FILE")
    ] = None
    previous: Annotated[Path | None, Flag("the bundle of the tasks before; it is not changed")] = None
    validation: Annotated[Path | None, Flag("validation data (default: a tenth of the task's, held out)")] = None
    anchors: Annotated[Path | None, Flag("the anchor store: read, and this task's are added", metavar="DIR")] = None
    base: Annotated[Path | None, Flag("questions the model answers well alone: the gate stays closed for them")] = None
    background: Annotated[Path | None, Flag(BACKGROUND)] = None
    near_misses: Annotated[Path | None, Flag(NEAR_MISSES, name="not")] = None
    recipe: Annotated[
        str | None, Flag(f"{' or '.join(NAMES)} (default: the previous bundle's, else {DEFAULT.name})", "NAME")
    ] = None
    anchors_per_task: Annotated[int, Field(ge=1), Flag("examples kept of each task")] = ANCHORS_PER_TASK
    created: Annotated[
        str | None, Flag("when the new entries count as made: a date (default: the start of the run)", metavar="DATE")
    ] = None
    expires: Annotated[
        str | None, Flag("servers stop using the new entries then: a date, or an age such as 90d", metavar="DATE")
    ] = None
    allow_worse: Annotated[bool, Flag("write the bundle even if it does no better than no memory")] = False
    device: Annotated[str, Flag("torch device of the model: cpu, cuda, cuda:1", metavar="DEVICE")] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Flag("of the model's weights; bfloat16 takes half the memory"),
    ] = "float32"
    preset: Annotated[
        Literal["quick", "best"] | None,
        Flag("quick: one training of 100 steps; best: the search with twice the steps and patience"),
    ] = None
    dry_run: Annotated[bool, Flag("check everything, time a step, and say what would be computed and written")] = False
    publish: Annotated[
        str | None,
        Flag(f"load it into a server; {ADMIN_KEY_VARIABLE} and {API_KEY_VARIABLE} hold its keys", metavar="URL"),
    ] = None


def parse_arguments(arguments: Sequence[str] | None) -> tuple[SelectOptions, dict[str, Any]]:
    """The command's own options, and the recipe settings that were given.

    Raises:
        ConfigError: an unknown flag, or a value of the wrong type.
    """
    values = vars(_parser().parse_args(sys.argv[1:] if arguments is None else arguments))
    options = {name: values.pop(name) for name in flag_fields(SelectOptions) if name in values}
    return SelectOptions(**options), values


def choose_recipe(options: SelectOptions, previous: Bundle | None) -> Recipe[Any]:
    """The one for a document, if there is one; else as given, or the previous bundle's, or the default.

    Raises:
        ConfigError: neither a task nor a document is given, or both; or what the recipe does not take.
    """
    if (options.task is None) == (options.document is None):
        raise ConfigError("expected either --task or --document")
    if options.recipe is not None and options.recipe not in NAMES:
        raise ConfigError(f"--recipe must be {' or '.join(NAMES)}, found {options.recipe!r}")
    recipes = recipes_for("task" if options.document is None else "document")
    name = options.recipe or (previous.metadata.recipe if previous is not None else None)
    recipe = next((each for each in recipes if each.name == name), recipes[0])
    for field, (_, flag) in flag_fields(SelectOptions).items():
        kind = OF.get(field, field)
        if field in options.model_fields_set and kind in get_args(Input) and kind not in recipe.takes:
            raise _not_for(recipe, option_of(field, flag), [each for each in RECIPES.values() if kind in each.takes])
    return recipe


def recipe_settings(
    recipe: Recipe[Any], options: SelectOptions, values: Mapping[str, Any], previous: Bundle | None
) -> Settings:
    """The recipe's settings: the given values, those of a preset, what the previous bundle hands on, and defaults.

    Raises:
        ConfigError: a flag of another recipe is given, or a value is out of range.
    """
    for name in values:
        if name not in flag_fields(recipe.settings):
            others = [each for each in RECIPES.values() if name in flag_fields(each.settings)]
            raise _not_for(recipe, f"--{name.replace('_', '-')}", others)
    if options.preset and options.preset not in recipe.presets:
        raise _not_for(recipe, "--preset", [each for each in RECIPES.values() if options.preset in each.presets])
    preset = recipe.presets[options.preset] if options.preset else {}
    return settings_after(previous, recipe, {**preset, **values}, options.device)


def _not_for(recipe: Recipe[Any], flag: str, others: Sequence[Recipe[Any]]) -> ConfigError:
    names = " and ".join(repr(each.name) for each in others)
    return ConfigError(f"{flag} is for the recipe {names}, and this run's is {recipe.name!r}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} --model MODEL (--task TASK | --document FILE) --output OUTPUT [--base ...] [more]",
        description=(
            "After a task, write the next memory bundle, this task's anchors and a report; or the bundle of a "
            "document. A run that is killed resumes with the same arguments. Exit status: 0 success, 2 error, 3 the "
            "memory does no better on the validation examples than none, and only the report was written."
        ),
        allow_abbrev=False,
    )
    add_flags(parser.add_argument_group("first of all"), {"": SelectOptions}, FIRST)
    columns = list(flag_fields(ColumnOptions))
    add_flags(parser.add_argument_group("task data that is a table"), {"": SelectOptions}, columns)
    rest = [name for name in flag_fields(SelectOptions) if name not in (*FIRST, *columns)]
    add_flags(parser.add_argument_group("also"), {"": SelectOptions}, rest)
    settings = {name: recipe.settings for name, recipe in RECIPES.items()}
    names = dict.fromkeys(name for each in settings.values() for name in flag_fields(each))
    owners = {name: {r: each for r, each in settings.items() if name in flag_fields(each)} for name in names}
    shared = parser.add_argument_group("settings of several recipes")
    for name, whose in owners.items():
        if len(whose) > 1:
            add_flags(shared, whose, [name])
    for recipe, each in settings.items():
        own = [name for name in names if list(owners[name]) == [recipe]]
        add_flags(parser.add_argument_group(f"the recipe {recipe!r}"), {recipe: each}, own)
    return parser
