"""What the commands that fit a gate read: questions of no task, and how they are named on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inducekv_vllm.errors import TaskDataError

from ..gate.settings import GateSettings
from .flags import add_flags

if TYPE_CHECKING:
    from ..data.examples import Example

BACKGROUND: Final = (
    "requests that need no memory, besides those of the package: .txt with one a line, or task data"  # of --background
)


def add_fit_flags(parser: argparse._ActionsContainer) -> None:
    """--background, --gate-misses and --seed."""
    parser.add_argument("--background", type=Path, metavar="FILE", help=BACKGROUND)
    add_flags(parser, {"": GateSettings})


def fit_settings(options: argparse.Namespace) -> GateSettings:
    """Raises ConfigError: a value is out of range."""
    given: dict[str, Any] = {name: getattr(options, name) for name in GateSettings.model_fields if name in options}
    return GateSettings(**given)


def read_base(path: Path, questions: Iterable[Example], source: object) -> list[Example]:
    """Questions that need no memory.

    Raises:
        TaskDataError: the file cannot be read, or holds one of these `questions`, which are those of `source`.
    """
    from ..data.examples import read_task

    base, digests = read_task(path), {example.source_digest for example in questions}
    for example in base:
        if example.source_digest in digests:
            raise TaskDataError(f"{path}: base question {example.id!r} is also a question of {source}")
    return base


def read_background_of(path: Path | None) -> list[Example]:
    """The user's background requests; none without a file. Raises TaskDataError."""
    from ..gate.background import read_background

    return read_background(path) if path else []
