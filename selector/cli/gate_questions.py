"""What the commands that fit a gate read: questions of no task, and how they are named on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inducekv_vllm.errors import ConfigError

from ..gate.settings import GateSettings
from .flags import add_flags

if TYPE_CHECKING:
    from ..gate.data import GateData

NEAR_MISSES: Final = "questions that look like a task's and are not: .txt with one a line, or task data"  # of --not
BACKGROUND: Final = (
    "requests that need no memory, besides those of the package: .txt with one a line, or task data"  # of --background
)


def add_fit_flags(parser: argparse._ActionsContainer) -> None:
    """--background, --not, --gate-misses and --seed."""
    parser.add_argument("--background", type=Path, metavar="FILE", help=BACKGROUND)
    parser.add_argument("--not", dest="near_misses", type=Path, metavar="FILE", help=NEAR_MISSES)
    add_flags(parser, {"": GateSettings})


def fit_settings(options: argparse.Namespace) -> GateSettings:
    """Raises ConfigError: a value is out of range."""
    given: dict[str, Any] = {name: getattr(options, name) for name in GateSettings.model_fields if name in options}
    return GateSettings(**given)


def require_no_fit(options: argparse.Namespace) -> None:
    """Raises ConfigError: one of the flags of `add_fit_flags` is given to a command that fits no gate."""
    names = [name for name in GateSettings.model_fields if name in options]
    names += [name for name in ("background", "near_misses") if getattr(options, name)]
    if names:
        flag = "not" if names[0] == "near_misses" else names[0].replace("_", "-")
        raise ConfigError(f"--{flag} is of a gate's fit: give --gate and --base, too")


def read_others_of(options: argparse.Namespace) -> GateData:
    """What --base, --background and --not name. Raises TaskDataError."""
    from ..gate.data import read_others

    return read_others(options.base or (), options.background or (), options.near_misses or ())
