"""Background work that leaves the cores to the requests that run, and how others wait for its end.

On a CPU, loads and steps share the cores and Python's lock. What is done in one go holds a step up for as long as the
scheduler lets it; in small pieces, each of which lets requests go first, a step is late by a piece.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

POLL_S = 0.02  # how often the workers are asked whether they have done it: each question holds the next step up


class _Thread(threading.local):
    let_go_first: Callable[[], float] | None = None
    until = 0.0  # in CPU time of the thread: when it is called again


_thread = _Thread()


@contextmanager
def beside_requests(let_go_first: Callable[[], float]) -> Iterator[None]:
    """Within this context the calling thread lets requests go first at each `rest`.

    Args:
        let_go_first: waits while requests need the cores, but not for long; returns for how much CPU time, in seconds,
            the thread goes on beside them before it is called again.
    """
    _thread.let_go_first = let_go_first
    try:
        yield
    finally:
        _thread.let_go_first, _thread.until = None, 0.0


def rest() -> None:
    """Call it between small pieces of work. Outside of `beside_requests` it does nothing."""
    if _thread.let_go_first is not None and time.thread_time() >= _thread.until:
        seconds = _thread.let_go_first()
        _thread.until = time.thread_time() + seconds
