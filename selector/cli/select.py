"""`inducekv-select`: after a task, write the next memory bundle.

Reads the task's examples, the previous bundle and the anchors of earlier tasks. Writes the next bundle, this task's
anchors, and a report as NAME.report.json and NAME.report.html beside the bundle. A run that is killed resumes with the
same arguments, and ends with the same bundle.

Exit status: 0 for success; 2 for an error, printed in one line on standard error; 3 if the new memory does no better on
the validation examples than none, and without --allow-worse only the report is written.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inducekv_vllm.bundle import Bundle, read_bundle
from inducekv_vllm.errors import ConfigError, InduceKVError, TaskDataError

from ..refined.settings import RefinedSettings
from ..update.recipes import REFINED
from .flags import error_line, require_output
from .gate_questions import read_background_of, read_base
from .gate_tables import print_prices
from .loading import load_backbone
from .moments import moment, moment_after
from .publishing import publish, require_address
from .settings import PROGRAM, SelectOptions, choose_recipe, parse_arguments, recipe_settings
from .warned import warnings_as_lines

if TYPE_CHECKING:
    from ..backbone.model import Backbone
    from ..data.anchors import AnchorStore
    from ..data.examples import Example
    from ..paper.settings import PaperSettings
    from ..runtime.callback import Callback
    from ..runtime.checkpoint import Checkpoint
    from ..update.inputs import TaskInputs
    from ..update.result import UpdateResult

SUCCESS, FAILED, WORSE = 0, 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
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
    if recipe == REFINED and options.device != "cpu":
        values = {"precision": "bfloat16", **values}
    settings = recipe_settings(recipe, options, values, previous)
    if isinstance(settings, RefinedSettings) and "precision" not in values and settings.precision == "float32":
        _note("this CPU has no bfloat16 instructions: training in float32 (--precision)")

    from ..data.anchors import AnchorStore, examples_digest
    from ..runtime.checkpoint import identity_digest
    from ..update.inputs import TaskInputs
    from .outputs import sole_writer
    from .tensorboard import TensorBoard

    training, validation = _split(options, settings.seed)
    base = _read_base(options, recipe, [*training, *validation])
    background = read_background_of(options.background)
    store = AnchorStore(options.anchors) if options.anchors else None
    if store is None and isinstance(settings, RefinedSettings):
        _warn("no --anchors: a later task can only continue this bundle with anchors of all tasks before it")

    identity = {
        "model": options.model,
        "recipe": recipe,
        "settings": settings.model_dump(),
        "base": examples_digest(base),
        "background": examples_digest(background),
        "training": examples_digest(training),
        "validation": examples_digest(validation),
        "previous": previous.digest if previous else None,
        "anchor_policy": options.anchor_policy,
        "anchors_per_task": options.anchors_per_task,
    }
    if options.dtype != "float32":
        identity["dtype"] = options.dtype
    identity |= {name: text for name in ("created", "expires") if (text := getattr(options, name)) is not None}
    run_name = identity_digest(identity)
    learnt = {example.task for example in training}
    if store:
        store.require_new(learnt, run_name, replace=options.replace)
    anchors = store.read(except_run=run_name, except_tasks=learnt if options.replace else ()) if store else []
    identity["anchors"] = examples_digest(anchors)
    inputs = TaskInputs(training, validation, anchors, previous)
    _check_inputs(inputs, settings, background)

    if options.dry_run:
        from .dry_run import dry_run

        dry_run(load_backbone(options.model, options.device, options.dtype), inputs, settings, options.output)
        return SUCCESS
    callbacks = [TensorBoard(options.log_dir)] if options.log_dir else []
    with sole_writer(options.output):
        checkpoint = _finished_checkpoint(options.output, identity)
        if checkpoint is None:
            checkpoint = _update_and_write(
                options, settings, inputs, base, background, store, run_name, identity, callbacks
            )
        if checkpoint is None:
            return WORSE
        if options.publish:
            publish(options.publish, options.output)
        checkpoint.remove()  # only now: if the server refuses, the same command publishes again without computing
    return SUCCESS


def checkpoint_folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.progress")


def _check_paths(options: SelectOptions) -> None:
    require_output(options.output, folder_is_made=True)
    if options.previous and options.output.resolve() == options.previous.resolve():
        raise ConfigError(f"--output {options.output} is the previous bundle, which stays as it is: name another file")
    if options.publish:
        require_address(options.publish)


def _dates(options: SelectOptions, began: datetime) -> tuple[datetime, datetime | None]:
    """When the new entries count as made, and when they expire. Raises ConfigError: neither date nor age."""
    created = moment(options.created, "--created") if options.created else began
    return created, moment_after(options.expires, created, "--expires") if options.expires else None


def _split(options: SelectOptions, seed: int) -> tuple[list[Example], list[Example]]:
    """Training and validation examples: from two files, or one file split by the seed."""
    from ..data.choice import hold_out
    from ..data.examples import read_task
    from ..data.repeats import distinct

    examples = distinct(read_task(options.task, options.columns()))
    if options.validation:
        validation = read_task(options.validation, options.columns())
        training_digests = {example.source_digest for example in examples}
        for example in validation:
            if example.source_digest in training_digests:
                raise TaskDataError(
                    f"{options.validation}: example {example.id!r} is also a training example of {options.task}"
                )
        return examples, validation
    if len(examples) < 2:
        raise TaskDataError(f"{options.task}: a tenth is held out for validation; with one example, use --validation")
    return hold_out(examples, seed)


def _read_base(options: SelectOptions, recipe: str, questions: Sequence[Example]) -> list[Example]:
    """The base questions; none of them may be one of the task's `questions`."""
    if not options.base:
        if recipe == REFINED:
            _warn("no --base: the gate knows only everyday requests that need no memory")
        return []
    return read_base(options.base, questions, options.task)


def _check_inputs(inputs: TaskInputs, settings: PaperSettings | RefinedSettings, background: Sequence[Example]) -> None:
    """The recipe's checks that need no model."""
    from ..gate.fit import check_questions
    from ..paper.update import grid
    from ..refined.checks import check_tasks, own_questions
    from ..update.inputs import check_answers

    check_answers(inputs)
    if not isinstance(settings, RefinedSettings):
        grid(inputs, settings)
        return
    check_tasks(inputs, settings)
    check_questions(own_questions(inputs), background)


def _finished_checkpoint(output: Path, identity: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint of a run that has written everything but was not cleared away, if there is one."""
    from ..runtime.checkpoint import Checkpoint

    finished = Checkpoint.finished(checkpoint_folder(output), identity)
    if finished is None:
        return None
    checkpoint, digest = finished
    if not output.exists() or read_bundle(output).digest != digest:
        return None
    _note(f"{output} is written already, digest {digest}")
    return checkpoint


def _update_and_write(
    options: SelectOptions,
    settings: PaperSettings | RefinedSettings,
    inputs: TaskInputs,
    base: Sequence[Example],
    background: Sequence[Example],
    store: AnchorStore | None,
    run_name: str,
    identity: dict[str, Any],
    callbacks: Sequence[Callback],
) -> Checkpoint | None:
    """Update and write everything; None if only the report is written, because the memory does no better than none."""
    from ..report.files import write_report
    from ..runtime.checkpoint import Checkpoint
    from ..update.dates import with_dates
    from .outputs import KeptAnchors, write_outputs

    _note(f"loading {options.model}")
    backbone = load_backbone(options.model, options.device, options.dtype)
    checkpoint, resumed = Checkpoint.open(checkpoint_folder(options.output), identity)
    if resumed:
        _note("resuming an earlier run")
    try:
        result = _update(backbone, inputs, settings, checkpoint, base, background, callbacks)
    except InduceKVError:
        checkpoint.remove_unless_begun()  # examples that do not fit the model are found before there is progress
        raise
    bundle = with_dates(result.bundle, inputs.previous, *_dates(options, checkpoint.began))
    result = replace(result, bundle=bundle, report=result.report | {"digest": bundle.digest})
    if (problem := _no_better(result.report)) and not options.allow_worse:
        write_report(options.output, result.report)
        _note(f"{problem}; no bundle was written (--allow-worse writes it, without repeating the computation)")
        return None
    anchors = _choose_anchors(options, settings, backbone, inputs, result) if store else []
    kept = KeptAnchors(store, anchors, options.anchor_policy, run_name, options.replace) if store else None
    write_outputs(options.output, result, kept, settings.seed)
    checkpoint.finish(result.bundle.digest)
    _summarize(result, options)
    return checkpoint


def _update(
    backbone: Backbone,
    inputs: TaskInputs,
    settings: PaperSettings | RefinedSettings,
    checkpoint: Checkpoint,
    base: Sequence[Example],
    background: Sequence[Example],
    callbacks: Sequence[Callback],
) -> UpdateResult:
    from ..paper.update import update_paper
    from ..refined.update import update_refined

    if isinstance(settings, RefinedSettings):
        return update_refined(
            *(backbone, inputs, settings, checkpoint),
            base=base,
            background=background,
            progress=True,
            callbacks=callbacks,
        )
    return update_paper(backbone, inputs, settings, checkpoint, progress=True)


def _choose_anchors(
    options: SelectOptions,
    settings: PaperSettings | RefinedSettings,
    backbone: Backbone,
    inputs: TaskInputs,
    result: UpdateResult,
) -> list[Example]:
    from ..backbone.scoring import Scorer
    from ..data.choice import choose_anchors

    losses: list[float] = []
    if options.anchor_policy == "hard":
        losses = Scorer(backbone, batch_size=settings.batch_size).untouched_losses(inputs.training)
    rows = choose_anchors(
        inputs.training,
        options.anchors_per_task,
        options.anchor_policy,
        settings.seed,
        keys=result.training_keys,
        losses=losses,
    )
    return [inputs.training[row] for row in rows]


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


def _summarize(result: UpdateResult, options: SelectOptions) -> None:
    from ..report.files import report_path

    bundle: Bundle = result.bundle
    output = options.output
    rounding = result.report.get("rounding")
    if rounding and rounding["collapsed"]:
        _warn(
            f"the selection collapsed onto {rounding['support']} entries; "
            f"{rounding['selected_without_weight']} of the {rounding['selected']} selected have no weight and are "
            "there by their order alone (--step-rule normalized avoids it)"
        )
    if problem := _no_better(result.report):
        _warn(problem)
    tasks = "".join(f", {task} ({count})" for task, count in result.report["composition"]["after"].items())
    print(f"{output}: {bundle.num_entries} entries{tasks}, digest {bundle.digest}")
    facts = result.report.get("facts") or {}
    if facts.get("facts"):
        how = "alone: they answer every validation question" if "facts" in facts["accuracy"] else "beside the memory"
        print(f"{output}: {facts['facts']} examples are facts, {how}; docs/facts.md")
    if gate := result.report.get("gate"):
        print_prices(gate["prices"], bundle.metadata.settings["gate_misses"])
    if accuracy := result.report.get("validation_accuracy"):
        _print_accuracy(accuracy, result.report["pool"]["validation_examples"])
    if base := result.report.get("base_accuracy"):
        print(
            f"base questions answered right (of {base['questions']} that the gate was fitted to): "
            f"{base['deployed']:.1%}; {base['no_memory']:.1%} without memory"
        )
    print(f"memory: {result.report['memory_bytes'] / 1e6:.2f} MB; report: {report_path(output).with_suffix('.html')}")
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
