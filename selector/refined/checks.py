"""What the refined recipe refuses before it computes anything, and which task it is about."""

from collections.abc import Sequence

from inducekv_vllm.errors import BundleError, ConfigError, TaskDataError

from ..backbone.scoring import Scorer
from ..data.examples import Example
from ..update.inputs import TaskInputs, check_fit
from ..update.settings import REFINED
from .entries import number_of_entries, settings_for
from .settings import RefinedSettings
from .shape import shape_of_entries, sizes_in_settings


def check_tasks(inputs: TaskInputs, settings: RefinedSettings) -> None:
    """The checks that need no model.

    Raises:
        TaskDataError: the examples belong to several tasks or to one of the previous bundle.
        BundleError: the previous bundle has another form, weighting, number of tokens or rank of maps.
        ConfigError: anchors are missing or superfluous, or the budget is too small.
    """
    task = new_task(inputs.training)
    for example in inputs.validation:
        if example.task != task:
            raise TaskDataError(
                f"validation example {example.id!r} is of the task {example.task!r}, expected {task!r}: give both one "
                "name (--task-name)"
            )
    if task in inputs.earlier_tasks:
        raise TaskDataError(
            f"the previous bundle already holds the task {task!r}, and a task is refined once: to learn it "
            f"again, take it out with `inducekv-bundle forget --task {task}`"
        )
    if missing := sorted(set(inputs.earlier_tasks) - {anchor.task for anchor in inputs.anchors}):
        raise ConfigError(
            f"there are no anchors of the task {missing[0]!r}, which the previous bundle holds: "
            "the gate is fitted to anchors of every task; give the store that its run has written"
        )
    if inputs.previous is None and inputs.anchors:
        raise ConfigError(
            f"the store holds anchors of the task {inputs.anchors[0].task!r}, but there is no previous bundle: "
            "name it, or use another store for this stream"
        )
    previous = inputs.previous.metadata if inputs.previous is not None else None
    if previous is not None and previous.recipe == REFINED:
        for name in ("form", "weighting"):
            if getattr(previous, name) != getattr(settings, name):
                raise BundleError(
                    f"the previous bundle was refined for the {name} {getattr(previous, name)!r}, "
                    f"found {getattr(settings, name)!r} in the settings"
                )
        rank, tokens = (sizes_in_settings(previous)[name] for name in ("map_rank", "payload_tokens"))
        if previous.entries and rank != settings.map_rank:
            raise BundleError(f"the previous bundle has maps of rank {rank}, found {settings.map_rank} in the settings")
        if previous.entries and tokens != settings.payload_tokens:
            raise BundleError(
                f"the previous bundle has {tokens} payload tokens an entry, "
                f"found {settings.payload_tokens} in the settings"
            )
    if previous is None or previous.recipe == REFINED:
        number_of_entries(inputs, settings)


def check_model(
    scorer: Scorer, inputs: TaskInputs, settings: RefinedSettings, progress: bool = False
) -> RefinedSettings:
    """The checks that need the model; the settings as they are for it. Raises as `RefinedRecipe.update` does."""
    settings = settings_for(scorer.backbone, settings, inputs.previous)
    if settings.form == "merged":
        scorer.backbone.require_full_attention()
    tokens = shape_of_entries(scorer.backbone, settings, inputs.previous).payload_tokens
    check_fit(scorer, inputs, settings.budget, tokens, progress)
    return settings


def own_questions(inputs: TaskInputs) -> dict[str, list[Example]]:
    """What the gate takes for questions of each task: anchors of the earlier ones, all examples of the new one."""
    earlier = {task: [anchor for anchor in inputs.anchors if anchor.task == task] for task in inputs.earlier_tasks}
    return earlier | {new_task(inputs.training): [*inputs.training, *inputs.validation]}


def new_task(examples: Sequence[Example]) -> str:
    """The task of the examples.

    Raises:
        TaskDataError: they belong to several tasks.
    """
    names = sorted({example.task for example in examples})
    if len(names) > 1:
        raise TaskDataError(f"the refined recipe takes one task at a time, found {', '.join(map(repr, names))}")
    return names[0]
