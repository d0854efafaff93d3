"""Progress on standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress_bar(title: str, total: int, shown: bool) -> Iterator[Callable[[int, str], None]]:
    """Yields a function of how many steps are done and a text to stand beside the bar and the time that is left."""
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task(title, total=total, text="")

        def advance(done: int, text: str) -> None:
            bar.update(task, completed=done, text=text)

        yield advance
