"""Warnings about task data, as lines of a command."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from ..data.notes import TaskDataWarning
from ..runtime.progress import note


@contextlib.contextmanager
def warnings_as_lines(program: str) -> Iterator[None]:
    """Print each TaskDataWarning as "PROGRAM: warning: ..." on standard error; other warnings as ever."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", TaskDataWarning)
        as_ever = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, TaskDataWarning):
                note(f"{program}: warning: {message}")
            else:
                as_ever(message, category, *place, **more)

        warnings.showwarning = show
        yield
