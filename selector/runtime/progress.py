"""Progress on standard error: bars on a terminal, elsewhere a line every so often."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_SECONDS = 15.0  # between two lines where there is no terminal
_T = TypeVar("_T")


def note(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def track(steps: Sequence[_T], title: str, shown: bool) -> Iterable[_T]:
    with progress_bar(title, len(steps), shown) as advance:
        for number, step in enumerate(steps, start=1):
            yield step
            advance(number, "")


@contextlib.contextmanager
def progress_bar(title: str, total: int, shown: bool) -> Iterator[Callable[[int, str], None]]:
    """Yields `advance(steps_done, text)`; the text is shown beside the progress."""
    console = Console(stderr=True)
    if not shown:
        yield lambda done, text: None
    elif not console.is_terminal:
        yield _lines(title, total)
    else:
        columns = (
            TextColumn("[progress.description]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(title, total=total, text="")
            yield lambda done, text: bar.update(task, completed=done, text=text)


def _lines(title: str, total: int) -> Callable[[int, str], None]:
    """Print the first step, the last one, and one every `LINE_SECONDS`."""
    began = time.monotonic()
    printed = -LINE_SECONDS

    def advance(done: int, text: str) -> None:
        nonlocal printed
        seconds = time.monotonic() - began
        if done < total and seconds < printed + LINE_SECONDS:
            return
        printed = seconds
        print(f"{title}: {done} of {total} after {seconds:.0f} s {text}".rstrip(), file=sys.stderr, flush=True)

    return advance
