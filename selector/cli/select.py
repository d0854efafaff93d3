"""`inducekv-select`: after a task, write the next memory bundle, or the bundle of documents.

Reads the task's examples, the previous bundle and the anchors of earlier tasks. Writes the next bundle, this task's
anchors, and a report as NAME.report.json beside the bundle. A run that is killed resumes with the same arguments, and
ends with the same bundle.

Exit status: 0 for success; 2 for an error, printed in one line on standard error; 3 if the new memory does no better on
the validation examples than none, and without --allow-worse only the report is written.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from inducekv_vllm.bundle import Bundle, read_bundle
from inducekv_vllm.errors import InduceKVError

from ..runtime.files import require_output
from .dates import read_date, read_date_after
from .flags import error_line
from .gate_tables import print_prices, print_warnings
from .loading import load_backbone
from .publish import load_finished, require_address
from .settings import PROGRAM, SelectOptions, choose_recipe, parse_arguments, recipe_settings
from .warned import warnings_as_lines

if TYPE_CHECKING:
    from ..backbone.model import Backbone
    from ..data.document import Document
    from ..run import Learned, TaskRequest
    from ..runtime.settings import Settings
    from ..update.recipe import Recipe

SUCCESS, FAILED, WORSE = 0, 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        with warnings_as_lines(PROGRAM):
            return run(*parse_arguments(arguments))
    except InduceKVError as error:
        print(error_line(PROGRAM, error), file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted; run it again with the same arguments to resume", file=sys.stderr)
    return FAILED


def run(options: SelectOptions, values: dict[str, Any]) -> int:
    """Read, update, write. Whatever can be refused is refused before the model is loaded.

    Args:
        values: the recipe settings that were given.
    """
    _check_paths(options)
    _dates(options, datetime.now(UTC))  # refused before anything is computed
    previous = read_bundle(options.previous) if options.previous else None
    recipe = choose_recipe(options, previous)
    settings = recipe_settings(recipe, options, values, previous)
    if "precision" not in values and getattr(settings, "precision", None) == "float32":
        _note("this CPU has no bfloat16 instructions: training in float32 (--precision)")
    if recipe.needs_anchors and not options.anchors:
        _warn("no --anchors: a later task can only continue this bundle with anchors of all tasks before it")
    if "base" in recipe.takes and not options.base:
        _warn("no --base: the gate knows only everyday requests that need no memory")

    from ..run import checked, learn
    from .dry_run import dry_run

    task = checked(_request(options, recipe, settings, previous))
    if options.dry_run:
        dry_run(task.request.load(), task, options.output)
        return SUCCESS
    learned = learn(task, partial(_show, options))
    return WORSE if learned.outcome == "no better" else SUCCESS


def _request(options: SelectOptions, recipe: Recipe[Any], settings: Settings, previous: Bundle | None) -> TaskRequest:
    """What the options ask for, with all data read."""
    from ..data.anchors import AnchorStore
    from ..data.examples import read_task
    from ..gate.data import read_others
    from ..run import Anchors, TaskRequest

    named = ("model", "anchors_per_task", "dtype", "created", "expires")
    anchors = None
    if options.anchors:
        anchors = Anchors(store=AnchorStore(options.anchors), count=options.anchors_per_task)
    return TaskRequest(
        load=partial(_load, options, recipe),
        recipe=recipe,
        settings=settings,
        examples=read_task(options.task, options.of_table()) if options.task else (),
        validation=read_task(options.validation, options.of_table()) if options.validation else None,
        documents=_documents(options),
        others=read_others(options.base or (), options.background or (), options.near_misses or (), options.of_table()),
        previous=previous,
        anchors=anchors,
        output=options.output,
        allow_worse=options.allow_worse,
        dates=partial(_dates, options),
        identity={name: getattr(options, name) for name in named},
        progress=True,
    )


def _documents(options: SelectOptions) -> list[Document]:
    from ..document.reading import read_documents

    return [] if options.document is None else read_documents(options.document, options.task_name)


def _load(options: SelectOptions, recipe: Recipe[Any]) -> Backbone:
    recipe.check_model(options.model)
    _note(f"loading {options.model}")
    return load_backbone(options.model, options.device, options.dtype)


def _check_paths(options: SelectOptions) -> None:
    data = (options.task, options.document, options.validation, options.base, options.background, options.near_misses)
    require_output(options.output, options.previous, *data, folder_is_made=True)
    if options.publish:
        require_address(options.publish)


def _dates(options: SelectOptions, began: datetime) -> tuple[datetime, datetime | None]:
    """When the new entries count as made, and when they expire. Raises ConfigError: neither date nor age."""
    created = read_date(options.created, "--created") if options.created else began
    return created, read_date_after(options.expires, created, "--expires") if options.expires else None


def _show(options: SelectOptions, learned: Learned) -> None:
    """Say what was learned, and hand it to a server. Raises ConfigError: the server refuses."""
    if learned.outcome == "no better":
        _note(
            f"{_no_better(learned.report)}; no bundle was written (--allow-worse writes it, without repeating the "
            "computation)"
        )
        return
    _summarize(learned, options)
    if options.publish:
        load_finished(options.publish, options.output)


def _no_better(report: dict[str, Any]) -> str | None:
    """What to say if the memory does no better on the validation examples than none."""
    from ..update.result import helps

    if helps(report):
        return None
    losses = report["validation_nll"]
    return (
        "on the validation examples the memory is no better than none: "
        f"NLL {losses['deployed']:.4f} with it, {losses['no_memory']:.4f} without"
    )


def _summarize(learned: Learned, options: SelectOptions) -> None:
    from ..update.outputs import report_path

    bundle, report, output = learned.bundle, learned.report, options.output
    rounding = report.get("rounding")
    if rounding and rounding["collapsed"]:
        _warn(
            f"the selection collapsed onto {rounding['support']} entries; "
            f"{rounding['selected_without_weight']} of the {rounding['selected']} selected have no weight and are "
            "there by their order alone"
        )
    if problem := _no_better(report):
        _warn(problem)
    tasks = "".join(f", {task} ({count})" for task, count in report["composition"]["after"].items())
    print(f"{output}: {bundle.num_entries} entries{tasks}, digest {bundle.digest}")
    facts = report.get("facts") or {}
    if refused := facts.get("refused"):
        _warn(f"the examples are not kept as facts: {refused}")
    if facts.get("facts"):
        how = "alone: they answer every validation question" if "facts" in facts["accuracy"] else "beside the memory"
        print(f"{output}: {facts['facts']} examples are facts, {how}; docs/facts.md")
    if gate := report.get("gate"):
        print_prices(gate["prices"], gate["misses"])
        print_warnings(gate["warnings"])
    if accuracy := report.get("validation_accuracy"):
        _print_accuracy(accuracy, report["pool"]["validation_examples"])
    if base := report.get("base_accuracy"):
        print(
            f"base questions answered right (of {base['questions']} that the gate was fitted to): "
            f"{base['deployed']:.1%}; {base['no_memory']:.1%} without memory"
        )
    print(f"memory: {report['memory_bytes'] / 1e6:.2f} MB; report: {report_path(output)}")
    print(f"serve it: inducekv-serve {shlex.quote(options.model)} --memory {shlex.quote(f'{output.stem}={output}')}")


def _print_accuracy(accuracy: dict[str, float], num_questions: int) -> None:
    """Before and after, and what guessing gets; a warning where the memory may be guessing too."""
    before, after, guessing = (accuracy[name] for name in ("no_memory", "deployed", "most_frequent_answer"))
    print(
        f"validation questions answered right (of {num_questions}): {after:.1%}; {before:.1%} without memory, "
        f"{guessing:.1%} by always giving the most frequent answer"
    )
    if after <= guessing + math.sqrt(guessing * (1 - guessing) / num_questions):
        _warn("within the error this is no better than guessing: more examples or more steps may help")


def _warn(text: str) -> None:
    _note(f"warning: {text}")


def _note(text: str) -> None:
    """A line that begins with the command's name."""
    from ..runtime.progress import note

    note(f"{PROGRAM}: {text}")


if __name__ == "__main__":
    sys.exit(main())
