"""`inducekv-bundle gate-fit`: the gate of a bundle, its first one or fitted again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from inducekv_vllm.bundle import Bundle, read_bundle, write_bundle
from inducekv_vllm.errors import BundleError, ConfigError

from ..gate.settings import GateOptions, GateSettings
from ..runtime.files import require_output
from .common import SUCCESS, add_base, add_bundle, add_model, add_output
from .flags import add_flags
from .gate_questions import BACKGROUND, NEAR_MISSES, read_others_of
from .gate_tables import print_fitted
from .loading import load_backbone

if TYPE_CHECKING:
    from ..data.examples import Example

FLAGS = ("gate_kind", "gate_misses")


def run(options: argparse.Namespace) -> int:
    """Write the next version of a bundle with its gate fitted again, or with a first one; all else stays as it is, to
    the bit.
    """
    settings = GateSettings(**{name: getattr(options, name) for name in FLAGS if name in options})
    require_output(options.output, options.path, *options.task, options.base, options.background, options.near_misses)
    bundle = read_bundle(options.path)
    tasks = _tasks(bundle, str(options.path))
    questions = read_others_of(options).of(_questions(options.task, tasks))

    from ..gate.data import check_questions
    from ..gate.fit import fit_gate

    check_questions(questions)
    backbone = load_backbone(options.model)
    bundle.require_backbone(backbone.fingerprint, str(options.path))
    fitted = fit_gate(backbone, questions, GateOptions.again(settings, bundle.gate), progress=True)
    after = bundle.with_gate(fitted.gate, fitted.recorded)
    write_bundle(after, options.output)
    print(f"{options.output}: a gate for {', '.join(tasks)}, digest {after.digest}")
    print_fitted(fitted)
    return SUCCESS


def _tasks(bundle: Bundle, source: str) -> tuple[str, ...]:
    """Those of its gate, or that a first one would have. Raises BundleError: it can have none."""
    if bundle.gate is not None:
        return bundle.gate.tasks
    if not bundle.metadata.tasks:
        raise BundleError(f"{source}: a bundle without entries has nothing that a first gate could open for")
    if bundle.metadata.weighting == "sqrt":
        raise BundleError(f'{source}: a relevance gate needs another weighting than "sqrt"')
    return bundle.metadata.tasks


def _questions(paths: Sequence[Path], tasks: Sequence[str]) -> dict[str, list[Example]]:
    """By task, in the order of `tasks`.

    Raises:
        TaskDataError: a file cannot be read.
        ConfigError: a file holds several tasks or another one than the bundle's, or one of these has no file.
    """
    from ..data.examples import read_task

    own: dict[str, list[Example]] = {task: [] for task in tasks}
    for path in paths:
        examples = read_task(path)
        found = sorted({example.task for example in examples})
        if len(found) > 1:
            raise ConfigError(f"--task {path}: expected questions of one task, found {', '.join(map(repr, found))}")
        if found[0] not in own:
            raise ConfigError(f"--task {path}: the bundle does not have the task {found[0]!r}")
        own[found[0]] += examples
    if missing := next((task for task, examples in own.items() if not examples), None):
        raise ConfigError(f"there are no questions of the task {missing!r}, which the bundle has: give a --task of it")
    return own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_bundle(parser)
    add_model(parser)
    text = "questions of one task; repeatable"
    parser.add_argument("--task", type=Path, action="append", required=True, metavar="FILE", help=text)
    add_base(parser)
    parser.add_argument("--background", type=Path, metavar="FILE", help=BACKGROUND)
    parser.add_argument("--not", dest="near_misses", type=Path, metavar="FILE", help=NEAR_MISSES)
    add_flags(parser, {"": GateSettings}, FLAGS)
    add_output(parser)
