"""`inducekv-bundle gate-fit`: the gate of a bundle, fitted again."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inducekv_vllm.bundle import Gate, read_bundle, write_bundle
from inducekv_vllm.errors import BundleError, ConfigError

from ..gate.settings import GateOptions
from ..runtime.files import require_output
from .gate_questions import add_fit_flags, fit_settings, read_others_of
from .gate_tables import print_fitted
from .loading import load_backbone

if TYPE_CHECKING:
    from ..data.examples import Example

SUCCESS = 0
Command = Callable[[argparse.Namespace], int]


def gate_fit(options: argparse.Namespace) -> int:
    """Write the next version of a bundle with its gate fitted again; all else stays as it is, to the bit."""
    settings = fit_settings(options)
    data = (*options.task, options.base, options.background, options.near_misses)
    require_output(options.output, options.path, *data)
    bundle = read_bundle(options.path)
    if (gate := bundle.gate) is None:
        raise BundleError(f"{options.path}: the bundle has no relevance gate")
    questions = read_others_of(options).of(_questions(options.task, gate))

    from ..gate.data import check_questions
    from ..gate.fit import fit_gate

    check_questions(questions)
    backbone = load_backbone(options.model, options.device)
    bundle.require_backbone(backbone.fingerprint, str(options.path))
    again = GateOptions.again(gate, settings.gate_misses, settings.seed)
    fitted = fit_gate(backbone, questions, again, progress=True)
    after = bundle.with_gate(fitted.gate, fitted.recorded)
    write_bundle(after, options.output)
    print(f"{options.output}: a gate for {', '.join(gate.tasks)}, digest {after.digest}")
    print_fitted(fitted)
    return SUCCESS


def _questions(paths: Sequence[Path], gate: Gate) -> dict[str, list[Example]]:
    """By task, in the order of the gate's tasks.

    Raises:
        TaskDataError: a file cannot be read.
        ConfigError: a file holds several tasks or one that the gate does not have, or a task of the gate has no file.
    """
    from ..data.examples import read_task

    own: dict[str, list[Example]] = {task: [] for task in gate.tasks}
    for path in paths:
        examples = read_task(path)
        tasks = sorted({example.task for example in examples})
        if len(tasks) > 1:
            raise ConfigError(f"--task {path}: expected questions of one task, found {', '.join(map(repr, tasks))}")
        if tasks[0] not in own:
            raise ConfigError(f"--task {path}: the bundle does not have the task {tasks[0]!r}")
        own[tasks[0]] += examples
    if missing := next((task for task, examples in own.items() if not examples), None):
        raise ConfigError(f"there are no questions of the task {missing!r}, which the bundle has: give a --task of it")
    return own


def add_command(command: Callable[[str, Command], argparse.ArgumentParser]) -> None:
    """Add this command to the parser of `inducekv-bundle`."""
    added = command("gate-fit", gate_fit)
    added.add_argument("path", metavar="BUNDLE", type=Path, help="a bundle file; it is not changed")
    added.add_argument("--model", required=True, help="model folder or Hugging Face id")
    added.add_argument(
        "--task", type=Path, action="append", required=True, metavar="FILE", help="questions of one task; repeatable"
    )
    added.add_argument("--base", type=Path, required=True, help="questions that the model answers well by itself")
    add_fit_flags(added)
    added.add_argument("--device", default="cpu", help="torch device of the fit (default cpu)")
    added.add_argument("--output", type=Path, required=True, help="the bundle file to write, replaced if it exists")
