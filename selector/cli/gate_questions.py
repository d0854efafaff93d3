"""What the commands that fit a gate read: questions of no task, and how they are named on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..data.examples import Example

NEAR_MISSES: Final = "questions that look like a task's and are not: .txt with one a line, or task data"  # of --not
BACKGROUND: Final = (
    "requests that need no memory, besides those of the package: .txt with one a line, or task data"  # of --background
)


def read_background_of(path: Path | None) -> list[Example]:
    """The user's background requests; none without a file. Raises TaskDataError."""
    from ..gate.background import read_background

    return read_background(path) if path else []
