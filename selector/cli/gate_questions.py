"""What the commands that fit a gate read: questions of no task, and how they are named on the command line."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..gate.data import GateData

NEAR_MISSES: Final = "questions that look like a task's and are not: .txt with one a line, or task data"  # of --not
BACKGROUND: Final = (
    "requests that need no memory, besides those of the package: .txt with one a line, or task data"  # of --background
)


def read_others_of(options: argparse.Namespace) -> GateData:
    """What --base, --background and --not name. Raises TaskDataError."""
    from ..gate.data import read_others

    return read_others(options.base or (), options.background or (), options.near_misses or ())
