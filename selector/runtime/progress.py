"""Progress bars on standard error, shown by the main process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import track as rich_track

from .distributed import is_main

_T = TypeVar("_T")


def track(steps: Sequence[_T], title: str, shown: bool) -> Iterable[_T]:
    """The steps, with a progress bar."""
    return rich_track(steps, title, console=Console(stderr=True), disable=not (shown and is_main()), transient=True)


@contextlib.contextmanager
def progress_bar(title: str, total: int, shown: bool) -> Iterator[Callable[[int, str], None]]:
    """Yields `advance(steps_done, text)`; the text is shown beside the bar."""
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not (shown and is_main()), transient=True) as bar:
        task = bar.add_task(title, total=total, text="")

        def advance(done: int, text: str) -> None:
            bar.update(task, completed=done, text=text)

        yield advance
