"""`inducekv-bundle route`: a gate in front of LoRA adapters."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import ConfigError

from ..runtime.files import require_output
from .gate_questions import add_fit_flags, fit_settings, read_others_of
from .gate_tables import print_fitted
from .loading import load_backbone

SUCCESS = 0
Command = Callable[[argparse.Namespace], int]


def route(options: argparse.Namespace) -> int:
    """Fit a gate that sends each request to its task's LoRA adapter, or to the untouched model, and write it."""
    settings = fit_settings(options)
    folders = [_task_adapter(argument) for argument in options.adapter]
    questions = (options.base, options.background, options.near_misses, *(data for *_, data in folders))
    require_output(options.output, *questions)
    if twice := next((task for task, count in Counter(task for task, *_ in folders).items() if count > 1), None):
        raise ConfigError(f"--adapter gives the task {twice!r} twice")

    from ..data.examples import read_task
    from ..gate.data import check_questions
    from ..update.route import route_bundle

    own = {task: read_task(data) for task, _, data in folders}
    questions_of_all = read_others_of(options).of(own)
    check_questions(questions_of_all)
    adapters = {task: folder for task, folder, _ in folders}
    backbone = load_backbone(options.model, options.device)
    folder = options.output.parent
    bundle, fitted = route_bundle(backbone, questions_of_all, adapters, settings, relative_to=folder, progress=True)
    write_bundle(bundle, options.output)
    print(f"{options.output}: a gate for the adapters of {', '.join(adapters)}, digest {bundle.digest}")
    print_fitted(fitted)
    return SUCCESS


def _task_adapter(argument: str) -> tuple[str, Path, Path]:
    """TASK=DIR:FILE. Raises ConfigError: it is not of that form."""
    task, _, rest = argument.partition("=")
    folder, _, data = rest.rpartition(":")
    if not (task and folder and data):
        raise ConfigError(f"--adapter must be TASK=DIR:FILE, found {argument!r}")
    return task, Path(folder), Path(data)


def add_command(command: Callable[[str, Command], argparse.ArgumentParser]) -> None:
    """Add this command to the parser of `inducekv-bundle`."""
    added = command("route", route)
    added.add_argument("--model", required=True, help="model folder or Hugging Face id")
    added.add_argument("--base", type=Path, required=True, help="questions that the model answers well by itself")
    added.add_argument(
        "--adapter",
        action="append",
        required=True,
        metavar="TASK=DIR:FILE",
        help="a task, the folder of its LoRA adapter as PEFT writes it, and task data; repeatable",
    )
    add_fit_flags(added)
    added.add_argument("--device", default="cpu", help="torch device of the fit (default cpu)")
    added.add_argument("--output", type=Path, required=True, help="the bundle file to write, replaced if it exists")
