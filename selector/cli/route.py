"""`inducekv-bundle route`: a gate in front of LoRA adapters."""

import argparse
from collections import Counter
from pathlib import Path

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.bundle.adapters import tensor_names
from inducekv_vllm.errors import ConfigError

from ..runtime.files import require_output
from .common import SUCCESS, add_base, add_model, add_output
from .gate_tables import print_fitted
from .loading import load_backbone


def run(options: argparse.Namespace) -> int:
    """Fit a gate that sends each request to its task's LoRA adapter, or to the untouched model, and write it.

    `gate-fit` fits it again, with background requests, near-misses, or another share of missed questions.
    """
    folders = [_task_adapter(argument) for argument in options.adapter]
    require_output(options.output, options.base, *(data for *_, data in folders))
    if twice := next((task for task, count in Counter(task for task, *_ in folders).items() if count > 1), None):
        raise ConfigError(f"--adapter gives the task {twice!r} twice")

    from ..data.examples import read_task
    from ..gate.data import check_questions, read_others
    from ..update.route import route_bundle

    questions = read_others(options.base).of({task: read_task(data) for task, _, data in folders})
    check_questions(questions)
    backbone, adapters = load_backbone(options.model), {task: folder for task, folder, _ in folders}
    bundle, fitted = route_bundle(backbone, questions, adapters, relative_to=options.output.parent, progress=True)
    write_bundle(bundle, options.output)
    print(f"{options.output}: a gate for the adapters of {', '.join(adapters)}, digest {bundle.digest}")
    for task, folder in adapters.items():
        print(f"{task}: all {len(tensor_names(folder))} tensors of {folder} fit a layer of the language model")
    print_fitted(fitted)
    return SUCCESS


def _task_adapter(argument: str) -> tuple[str, Path, Path]:
    """TASK=DIR:FILE. Raises ConfigError: it is not of that form."""
    task, _, rest = argument.partition("=")
    folder, _, data = rest.rpartition(":")
    if not (task and folder and data):
        raise ConfigError(f"--adapter must be TASK=DIR:FILE, found {argument!r}")
    return task, Path(folder), Path(data)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_base(parser)
    text = "a task, the folder of its LoRA adapter as PEFT writes it, and task data; repeatable"
    parser.add_argument("--adapter", action="append", required=True, metavar="TASK=DIR:FILE", help=text)
    add_output(parser)
