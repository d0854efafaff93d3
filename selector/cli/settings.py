"""The settings of `inducekv-select`: its own, and those of the recipes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.vllm_seams.config import ADMIN_KEY_VARIABLE

from ..client import API_KEY_VARIABLE
from ..data.choice import ANCHORS_PER_TASK, AnchorPolicy
from ..document.settings import DOCUMENT
from ..recipes import DEFAULT_RECIPE, RECIPES, RecipeSettings, settings_after
from ..runtime.settings import Flag
from ..update.settings import BUILD, PAPER, REFINED
from .columns import ColumnOptions
from .flags import Parser, add_flags, flag_fields, option_of, toml_arguments
from .gate_questions import BACKGROUND, NEAR_MISSES

PROGRAM: Final = "inducekv-select"
Preset = Literal["quick", "best"]
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "quick": MappingProxyType({"activation": "generation", "learning_rate": 0.1, "steps": 100}),
        "best": MappingProxyType({"steps": 400, "patience": 6}),
    }
)
FIRST: Final = (  # the flags that matter first
    *(
        "model",
        "task",
        "document",
        "output",
        "validation",
        "base",
        "previous",
        "anchors",
        "preset",
        "dry_run",
        "publish",
    ),
)
OF_TASKS: Final = (  # and not of documents
    *("recipe", "validation", "anchors", "anchor_policy", "anchors_per_task", "replace", "preset", "log_dir"),
    "columns",
)


class SelectOptions(ColumnOptions):
    """What to read and write."""

    model: Annotated[str, Flag("model folder or Hugging Face id")]
    output: Annotated[Path, Flag("the bundle to write, replaced if it exists; its folder is made")]
    task: Annotated[
        Path | None, Flag("the task's training data: JSON lines, CSV, TSV, Parquet, a folder of datasets")
    ] = None
    document: Annotated[
        Path | None, Flag("what to learn in place of a task: text, Markdown, HTML or PDF", metavar="FILE")
    ] = None
    previous: Annotated[Path | None, Flag("the bundle of the tasks before; it is not changed")] = None
    validation: Annotated[Path | None, Flag("validation data (default: a tenth of the task's, held out)")] = None
    anchors: Annotated[Path | None, Flag("the anchor store: read, and this task's are added", metavar="DIR")] = None
    base: Annotated[
        Path | None, Flag("questions the model answers well alone: the gate stays closed for them (refined only)")
    ] = None
    background: Annotated[Path | None, Flag(f"{BACKGROUND} (refined only)")] = None
    near_misses: Annotated[Path | None, Flag(f"{NEAR_MISSES} (refined only)", name="not")] = None
    recipe: Annotated[Literal["paper", "refined"] | None, Flag("(default: the previous bundle's, else refined)")] = None
    anchor_policy: Annotated[AnchorPolicy, Flag("how anchors are chosen")] = "random"
    anchors_per_task: Annotated[int, Field(ge=1), Flag("examples kept of each task")] = ANCHORS_PER_TASK
    replace: Annotated[bool, Flag("learn a task again: its anchors in the store give way to this run's")] = False
    created: Annotated[
        str | None, Flag("when the new entries count as made: a date (default: the start of the run)", metavar="DATE")
    ] = None
    expires: Annotated[
        str | None, Flag("servers stop using the new entries then: a date, or an age such as 90d", metavar="DATE")
    ] = None
    allow_worse: Annotated[bool, Flag("write the bundle even if it does no better than no memory")] = False
    config: Annotated[Path | None, Flag("a TOML file of these settings; flags win")] = None
    device: Annotated[str, Flag("torch device of the model: cpu, cuda, cuda:1", metavar="DEVICE")] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        Flag("of the model's weights; bfloat16 takes half the memory"),
    ] = "float32"
    preset: Annotated[
        Preset | None,
        Flag("quick: one training of 100 steps; best: the search with twice the steps and patience (refined only)"),
    ] = None
    dry_run: Annotated[bool, Flag("check everything, time a step, and say what would be computed and written")] = False
    log_dir: Annotated[
        Path | None, Flag("write the curves of the trainings there, for TensorBoard (refined only)", metavar="DIR")
    ] = None
    publish: Annotated[
        str | None,
        Flag(f"load it into a server; {ADMIN_KEY_VARIABLE} and {API_KEY_VARIABLE} hold its keys", metavar="URL"),
    ] = None


def parse_arguments(arguments: Sequence[str] | None) -> tuple[SelectOptions, dict[str, Any]]:
    """The command's own options, and the recipe settings that were given.

    Raises:
        ConfigError: an unknown flag or TOML key, or a value of the wrong type.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    values = vars(parser.parse_args([*toml_arguments(parser, given), *given]))
    options = {name: values.pop(name) for name in flag_fields(SelectOptions) if name in values}
    return SelectOptions(**options), values


def choose_recipe(options: SelectOptions, previous: Bundle | None) -> str:
    """As given, else the paper's after a bundle of that recipe or one that was only built, else the default.

    Raises:
        ConfigError: neither a task nor a document is given, or both, or an option that a document has no use for.
    """
    if (options.task is None) == (options.document is None):
        raise ConfigError("expected either --task or --document")
    if options.document is not None:
        for name in OF_TASKS:
            if name in options.model_fields_set:
                raise ConfigError(f"--{name.replace('_', '-')} is for tasks, and --document is given")
        return DOCUMENT
    if options.recipe is not None:
        return options.recipe
    return PAPER if previous is not None and previous.metadata.recipe in (PAPER, BUILD) else DEFAULT_RECIPE


def recipe_settings(
    recipe: str, options: SelectOptions, values: dict[str, Any], previous: Bundle | None
) -> RecipeSettings:
    """The recipe's settings: the given values, the previous bundle's budget and form, and defaults for the rest.

    Raises:
        ConfigError: a flag of the other recipe is given, or a value is out of range.
    """
    for name in values:
        if name not in flag_fields(RECIPES[recipe]):
            flag = f"--{name.replace('_', '-')}"
            if recipe == DOCUMENT:
                raise ConfigError(f"{flag} is for tasks, and --document is given")
            other = next((other for other in (PAPER, REFINED) if name in flag_fields(RECIPES[other])), None)
            whose = f"the recipe {other!r}" if other is not None else "documents"
            raise ConfigError(f"{flag} is a setting of {whose} only")
    for name in ("base", "background", "near_misses", "preset", "log_dir"):
        if getattr(options, name) and recipe == PAPER:
            flag = option_of(name, flag_fields(SelectOptions)[name][1])
            raise ConfigError(f"{flag} is a setting of the recipe 'refined' only")
    if options.preset:
        values = {**PRESETS[options.preset], **values}
    return settings_after(previous, recipe, values, options.device)


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
    names = dict.fromkeys(name for settings in RECIPES.values() for name in flag_fields(settings))
    owners = {name: {r: s for r, s in RECIPES.items() if name in flag_fields(s)} for name in names}
    shared = parser.add_argument_group("settings of several recipes")
    for name, settings in owners.items():
        if len(settings) > 1:
            add_flags(shared, settings, [name])
    for recipe in (REFINED, DOCUMENT, PAPER):
        own = [name for name in names if list(owners[name]) == [recipe]]
        add_flags(parser.add_argument_group(f"the recipe {recipe!r}"), {recipe: RECIPES[recipe]}, own)
    return parser
