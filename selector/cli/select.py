"""`inducekv-select`: after a task, choose the entries of the next memory bundle.

Reads the task's examples, the previous bundle and the anchors of earlier tasks, and writes the next bundle, this task's
anchors, and a report as NAME.report.json and NAME.report.html beside the bundle. It may be killed at any moment: run
again with the same arguments it goes on where it was, and ends with the same bundle.

`torchrun --standalone --nproc-per-node N -m selector.cli.select ...` shares the work among N processes, which see the
same files; torchrun has exit status 1 where this has any other than 0.

Exit status: 0 for success, 2 for an error, told in one line on standard error, and 3 where the new memory does no
better on the validation examples than none: then only the report is written, unless --allow-worse is given.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inducekv_vllm.bundle import Bundle, read_bundle
from inducekv_vllm.errors import ConfigError, InduceKVError, TaskDataError

from ..runtime.checks import require_at_least
from .publishing import API_KEY_VARIABLE, publish

if TYPE_CHECKING:
    from ..backbone.model import Backbone
    from ..data.anchors import AnchorStore
    from ..data.examples import Example
    from ..refined.settings import RefinedSettings
    from ..runtime.checkpoint import Checkpoint
    from ..update.inputs import TaskInputs, Update, UpdateSettings

SUCCESS, FAILED, WORSE = 0, 2, 3
PROGRAM = "inducekv-select"
DEFAULT_RECIPE = "refined"  # the one that benchmarks/continual found best
VALIDATION_SHARE = 0.1  # held out of the task's examples where no file of validation examples is given
# Flags by the recipe that knows them; each is the name of a setting, whose default stands there.
SHARED_SETTINGS = ("payload_tokens", "weighting", "beta", "batch_size", "seed")
RECIPE_SETTINGS = {
    "paper": ("gamma", "iterations", "inner_steps", "hypergradient", "step_rule", "shortlist", "shortlist_policy"),
    "refined": (
        *("steps", "entries_per_task", "entry_policy", "nested"),
        *("learning_rate", "distillation", "calibrate", "precision"),
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    from ..runtime.distributed import is_main, process_group, tell_error

    given = list(sys.argv[1:] if arguments is None else arguments)
    with process_group():
        try:
            options = _parser().parse_args([*_config_arguments(given), *given])
            return run(options)
        except InduceKVError as error:
            tell_error(f"{PROGRAM}: error: {' '.join(str(error).split())}")
            return FAILED
        except KeyboardInterrupt:
            if is_main():
                print(f"{PROGRAM}: interrupted; run it again with the same arguments to go on", file=sys.stderr)
            return FAILED


def run(options: argparse.Namespace) -> int:
    """Read, update, write; everything that can be refused is refused before the model is loaded."""
    _check_paths(options)
    previous = read_bundle(options.previous) if options.previous else None
    options.recipe = options.recipe or _usual_recipe(previous)

    from ..data.anchors import AnchorStore, examples_digest
    from ..data.examples import read_task
    from ..runtime.checkpoint import identity_digest
    from ..runtime.distributed import is_main, together, world_size
    from ..update.inputs import TaskInputs

    settings = _settings(options, previous)
    require_at_least(1, anchors_per_task=options.anchors_per_task)
    examples = read_task(options.task)
    training, validation = _split(examples, options)
    base = _base(options, [*training, *validation])
    store = AnchorStore(options.anchors) if options.anchors else None
    if store is None and options.recipe == "refined":
        _warn("no --anchors: a later task can only go on from this bundle with anchors of all tasks before it")

    identity = {
        "model": str(options.model),
        "recipe": options.recipe,
        "settings": asdict(settings),
        "base": examples_digest(base),
        "training": examples_digest(training),
        "validation": examples_digest(validation),
        "previous": previous.digest if previous else None,
        "anchor_policy": options.anchor_policy,
        "anchors_per_task": options.anchors_per_task,
    }
    run_name = identity_digest(identity)
    if store:
        store.require_new([example.task for example in training], run_name)
    anchors = store.read(except_run=run_name) if store else []
    # Not part of the name: sums of other processes round differently, but it is the same run that is made.
    identity |= {"anchors": examples_digest(anchors), "processes": world_size()}
    inputs = TaskInputs(training, validation, anchors, previous)
    _check_inputs(inputs, settings)

    checkpoint = _written(options.output, identity)
    if checkpoint is None:
        checkpoint = _make(options, settings, inputs, base, store, run_name, identity)
    if checkpoint is None:
        return WORSE
    with together():
        if is_main() and options.publish:
            publish(options.publish, options.output)
    checkpoint.remove()  # only now: a refused publication can be repeated without anything else
    return SUCCESS


def _usual_recipe(previous: Bundle | None) -> str:
    """The previous bundle's: no other could go on from it, but for the paper's from one that was only built."""
    if previous is None:
        return DEFAULT_RECIPE
    return previous.metadata.recipe if previous.metadata.recipe in RECIPE_SETTINGS else "paper"


def _written(output: Path, identity: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint of a run that has written everything already and is not yet cleared away, if there is one."""
    from ..runtime.checkpoint import Checkpoint
    from ..runtime.distributed import together

    found = Checkpoint.finished(checkpoint_folder(output), identity)
    if found is None:
        return None
    checkpoint, digest = found
    with together():
        if not output.exists() or read_bundle(output).digest != digest:
            return None
    _note(f"{output} is written already, digest {digest}")
    return checkpoint


def _make(
    options: argparse.Namespace,
    settings: UpdateSettings | RefinedSettings,
    inputs: TaskInputs,
    base: Sequence[Example],
    store: AnchorStore | None,
    run_name: str,
    identity: dict[str, Any],
) -> Checkpoint | None:
    """Update and write; None where nothing but the report is written, because the memory does no better than none."""
    from ..runtime.checkpoint import Checkpoint
    from ..runtime.distributed import is_main, together
    from .outputs import write_outputs, write_report

    backbone = _load(options.model)
    checkpoint, resumed = Checkpoint.open(checkpoint_folder(options.output), identity)
    if resumed:
        _note("going on where an earlier run ended")
    done = _update(backbone, inputs, settings, checkpoint, base)
    if (worse := _no_better(done.report)) and not options.allow_worse:
        with together():
            if is_main():
                write_report(options.output, done.report)
        _note(f"{worse}; no bundle was written (--allow-worse does, without repeating what is done)")
        return None
    anchors = _anchors(options, backbone, inputs, settings, done) if store else []
    with together():
        if is_main():
            write_outputs(options.output, done, store, anchors, options.anchor_policy, options.seed, run_name)
            checkpoint.finish(done.bundle.digest)
            _tell(done.bundle, done.report, options.output)
    return checkpoint


def _anchors(
    options: argparse.Namespace,
    backbone: Backbone,
    inputs: TaskInputs,
    settings: UpdateSettings | RefinedSettings,
    done: Update,
) -> list[Example]:
    """The examples that stay as the task's anchors."""
    from ..data.anchors import choose_anchors

    losses: list[float] = []
    if options.anchor_policy == "hard":
        losses = _frozen_losses(backbone, inputs.training, settings.batch_size)
    rows = choose_anchors(
        inputs.training,
        options.anchors_per_task,
        options.anchor_policy,
        options.seed,
        keys=done.training_keys,
        losses=losses,
    )
    return [inputs.training[row] for row in rows]


def _settings(options: argparse.Namespace, previous: Bundle | None) -> UpdateSettings | RefinedSettings:
    """The recipe's settings: what is given, and its own defaults for the rest.

    Raises:
        ConfigError: a flag of the other recipe is given, or a value is out of range.
    """
    from ..refined.settings import RefinedSettings
    from ..update.inputs import UpdateSettings

    given = vars(options)
    for recipe, names in RECIPE_SETTINGS.items():
        for name in names if recipe != options.recipe else ():
            if name in given:
                raise ConfigError(f"--{name.replace('_', '-')} is a setting of the recipe {recipe!r} only")
    if options.base and options.recipe != "refined":
        raise ConfigError("--base is a setting of the recipe 'refined' only")
    known = (*SHARED_SETTINGS, *RECIPE_SETTINGS[options.recipe])
    values: dict[str, Any] = {name: given[name] for name in known if name in given}
    if options.budget is not None or previous is not None:
        values["budget"] = previous.metadata.budget if options.budget is None and previous else options.budget
    return UpdateSettings(**values) if options.recipe == "paper" else RefinedSettings(**values)


def _check_inputs(inputs: TaskInputs, settings: UpdateSettings | RefinedSettings) -> None:
    """What can be refused before the model is loaded."""
    from ..refined.settings import RefinedSettings
    from ..refined.update import check_tasks
    from ..update.inputs import pairs_to_try

    if isinstance(settings, RefinedSettings):
        check_tasks(inputs, settings)
    else:
        pairs_to_try(inputs, settings)


def _update(
    backbone: Backbone,
    inputs: TaskInputs,
    settings: UpdateSettings | RefinedSettings,
    checkpoint: Checkpoint,
    base: Sequence[Example],
) -> Update:
    from ..refined.settings import RefinedSettings
    from ..refined.update import update_refined
    from ..update.inputs import update

    if isinstance(settings, RefinedSettings):
        return update_refined(backbone, inputs, settings, checkpoint, base=base, progress=True)
    return update(backbone, inputs, settings, checkpoint, progress=True)


def _no_better(report: dict[str, Any]) -> str | None:
    """What is to be said of a memory that does no better on the validation examples than none."""
    losses = report["validation_nll"]
    if losses is None or losses["deployed"] < losses["no_memory"]:
        return None
    return (
        "on the validation examples the memory is no better than none: "
        f"NLL {losses['deployed']:.4f} with it, {losses['no_memory']:.4f} without"
    )


def _check_paths(options: argparse.Namespace) -> None:
    if not options.output.parent.is_dir():
        raise ConfigError(f"--output {options.output}: the folder {options.output.parent} does not exist")
    if options.output.is_dir():
        raise ConfigError(f"--output {options.output} is a folder, expected the name of a file")
    if options.previous and options.output.resolve() == options.previous.resolve():
        raise ConfigError(f"--output {options.output} is the previous bundle, which stays as it is: name another file")
    if options.publish and not options.publish.startswith(("http://", "https://")):
        raise ConfigError(f"--publish must be an http or https address, found {options.publish!r}")


def _split(examples: Sequence[Any], options: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """Training and validation examples: of two files, or of one by the seed."""
    import numpy as np

    from ..data.examples import read_task

    if options.validation:
        validation = read_task(options.validation)
        seen = {example.source_digest for example in examples}
        for example in validation:
            if example.source_digest in seen:
                raise TaskDataError(
                    f"{options.validation}: example {example.id!r} is also a training example of {options.task}"
                )
        return list(examples), validation
    if len(examples) < 2:
        raise TaskDataError(f"{options.task}: a tenth is held out for validation; with one example, use --validation")
    count = max(1, round(VALIDATION_SHARE * len(examples)))
    held_out = set(np.random.default_rng((options.seed, 5)).choice(len(examples), count, replace=False).tolist())
    training = [example for row, example in enumerate(examples) if row not in held_out]
    return training, [examples[row] for row in sorted(held_out)]


def _base(options: argparse.Namespace, asked: Sequence[Example]) -> list[Example]:
    """The base questions, none of which may be one of the task's own."""
    from ..data.examples import read_task

    if not options.base:
        if options.recipe == "refined":
            _warn("no --base: the gate cannot tell the tasks' questions from those that need no memory")
        return []
    base, own = read_task(options.base), {example.source_digest for example in asked}
    for example in base:
        if example.source_digest in own:
            raise TaskDataError(f"{options.base}: base question {example.id!r} is also a question of {options.task}")
    return base


def _warn(text: str) -> None:
    _note(f"warning: {text}")


def _note(text: str) -> None:
    """Tell it on standard error, once for all processes."""
    from ..runtime.distributed import is_main

    if is_main():
        print(f"{PROGRAM}: {text}", file=sys.stderr)


def _load(model: str) -> Any:
    from transformers.utils.logging import disable_progress_bar

    from ..backbone.model import Backbone

    disable_progress_bar()  # type: ignore[no-untyped-call]
    return Backbone.load(model)


def _frozen_losses(backbone: Any, examples: Sequence[Any], batch_size: int) -> list[float]:
    """NLL of each example without memory."""
    import torch

    from ..backbone.scoring import Scorer

    scorer = Scorer(backbone)
    losses: list[float] = []
    with torch.no_grad():
        for start in range(0, len(examples), batch_size):
            losses += scorer.losses(examples[start : start + batch_size]).tolist()
    return losses


def checkpoint_folder(output: Path) -> Path:
    return output.with_name(f".{output.name}.progress")


def _tell(bundle: Bundle, report: dict[str, Any], output: Path) -> None:
    rounding = report.get("rounding")
    if rounding and rounding["collapsed"]:
        _warn(
            f"the selection collapsed onto {rounding['support']} entries; "
            f"{rounding['selected_without_weight']} of the {rounding['selected']} selected have no weight and stand "
            "there by their order alone (--step-rule normalized avoids it)"
        )
    if worse := _no_better(report):
        _warn(worse)
    tasks = ", ".join(f"{task} ({count})" for task, count in report["composition"]["after"].items())
    print(f"{output}: {bundle.num_entries} entries, {tasks}, digest {bundle.digest}")


def _config_arguments(given: Sequence[str]) -> list[str]:
    """The settings of `--config FILE` as arguments, to stand before those given, which therefore win."""
    finder = _Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    path = finder.parse_known_args(list(given))[0].config
    if path is None:
        return []
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the settings: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    known = {action.option_strings[0]: action for action in _parser()._actions if action.option_strings}
    arguments: list[str] = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if flag not in known or flag in ("--config", "--help"):
            raise ConfigError(f"{path}: unknown setting {name!r}")
        if known[flag].nargs == 0:
            if not isinstance(value, bool):
                raise ConfigError(f"{path}: {name} must be true or false, found {value!r}")
            arguments += [flag] if value else []
        elif isinstance(value, bool | list | dict):
            raise ConfigError(f"{path}: {name} must be a number or a string, found {value!r}")
        else:
            arguments += [f"{flag}={value}"]
    return arguments


class _Parser(argparse.ArgumentParser):
    """One whose complaints are errors like all others."""

    def error(self, message: str) -> Any:
        raise ConfigError(message)


def _parser() -> argparse.ArgumentParser:
    from ..data.anchors import POLICIES

    parser = _Parser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--model", required=True, help="model folder or Hugging Face id")
    add("--task", type=Path, required=True, help="the task's training data: .jsonl, or LLaVA's .json")
    add("--output", type=Path, required=True, help="the bundle to write, replaced if it exists")
    add("--previous", type=Path, help="the bundle of the tasks before; stays as it is")
    add("--validation", type=Path, help="validation data (default: a tenth of the task's, held out by the seed)")
    add("--anchors", type=Path, metavar="DIR", help="the store of anchors: read, and this task's are added")
    add("--recipe", choices=tuple(RECIPE_SETTINGS), help="(default: the previous bundle's, else refined)")
    add("--budget", type=int, help="the most entries the memory may have (default: the previous bundle's, else 256)")
    add("--anchor-policy", choices=POLICIES, default="random")
    add("--anchors-per-task", type=int, default=64, help="(default 64)")
    add("--allow-worse", action="store_true", help="write the bundle even if it does no better than no memory")
    # Of these only what is given is there: the recipes have their own defaults.
    shared = parser.add_argument_group("settings of both recipes", argument_default=argparse.SUPPRESS)
    add = shared.add_argument
    add("--payload-tokens", type=int, help="tokens an entry keeps in each layer (default 8)")
    add(
        "--weighting",
        choices=("sqrt", "prior"),
        help="how weights enter attention (default: paper sqrt, refined prior)",
    )
    add(
        "--beta", type=float, help="weight of the anchors (default: paper as the previous bundle or by grid, refined 1)"
    )
    add("--batch-size", type=int, help="examples of a step (default: paper 8, refined 16)")
    add("--seed", type=int, default=0)
    add = parser.add_argument_group("the recipe 'paper'", argument_default=argparse.SUPPRESS).add_argument
    add("--gamma", type=float, help="weight of the coverage (default: as the previous bundle has it, else by the grid)")
    add("--iterations", type=int, help="outer steps (default 100)")
    add("--inner-steps", type=int, help="calibration steps before each (default 10)")
    add("--hypergradient", choices=("alternating", "unrolled"))
    add("--step-rule", choices=("plain", "normalized"), help="plain is the paper's")
    add("--shortlist", type=int, metavar="TIMES", help="keep TIMES the budget of candidates (default 8)")
    add("--full-pool", action="store_const", const=None, dest="shortlist", help="keep all candidates")
    add("--shortlist-policy", choices=("nearest", "random"), help="random is the control")
    add = parser.add_argument_group("the recipe 'refined'", argument_default=argparse.SUPPRESS).add_argument
    add(
        "--base", type=Path, default=None, help="questions the model answers well alone: the gate stays closed for them"
    )
    add("--entries-per-task", type=int, help="halved for all tasks where the budget does not hold as many (default 4)")
    add("--entry-policy", choices=("random", "k-center"), help="which examples entries start from (default random)")
    add(
        "--no-nested",
        action="store_false",
        dest="nested",
        help="do not train every half of a task's entries to do alone; halved quotas are then merged by distillation",
    )
    add("--steps", type=int, help="of refinement (default 400)")
    add("--learning-rate", type=float, help="of payloads (default: searched on the validation examples)")
    add(
        "--distillation",
        type=float,
        help="weight of the previous memory's answers where entries are merged (default 1)",
    )
    add(
        "--calibrate",
        choices=("first", "every", "never"),
        help="train temperature, gates and bias with (default first)",
    )
    add(
        "--precision", choices=("bfloat16", "float32"), help="of the model's products while refining (default bfloat16)"
    )
    add = parser.add_argument
    add("--config", type=Path, help="a TOML file of these settings; arguments given here win")
    add("--publish", metavar="URL", help=f"load the bundle into this server; {API_KEY_VARIABLE} holds its API key")
    return parser


if __name__ == "__main__":
    from ..runtime.distributed import leave

    leave(main())
