"""Background work that leaves most of each core to the requests that run, and how others wait for its end.

On a CPU, loads and steps share the cores. Work that is done in one go holds a step up for as long as the scheduler lets
it; in small pieces with rests between them, a step is late by a piece or two. What takes two pieces is done in one go.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SHARE = 0.25  # of a core that the work takes while requests run
PIECE_S = 0.001  # CPU time of a piece
UNPACED_S = 0.002  # CPU time before the first rest: a copy in host memory is loaded within it
LEAST_DELAY_S, LONGEST_DELAY_S = 0.002, 0.02


@dataclass
class _Pace:
    is_busy: Callable[[], bool]
    began: float  # the running piece, in CPU time of the thread
    paced_from: float  # likewise, the first rest


class _Thread(threading.local):
    pace: _Pace | None = None


_thread = _Thread()


@contextmanager
def beside_requests(is_busy: Callable[[], bool]) -> Iterator[None]:
    """Within this context the calling thread rests at each `rest`, if `is_busy` says that requests run.

    Not in the first milliseconds (`UNPACED_S`).
    """
    now = time.thread_time()
    _thread.pace = _Pace(is_busy, now, now + UNPACED_S)
    try:
        yield
    finally:
        _thread.pace = None


def rest() -> None:
    """Call it between small pieces of work. Outside of `beside_requests` it does nothing."""
    pace = _thread.pace
    if pace is None or (worked := (now := time.thread_time()) - pace.began) < PIECE_S:
        return
    if now >= pace.paced_from and pace.is_busy():
        time.sleep(worked * (1 / SHARE - 1))
    pace.began = time.thread_time()


def poll_delays() -> Iterator[float]:
    """Seconds to wait between questions whether the workers have done what they do in the background.

    A tenth of the time since this call, so that the answer comes little later than the end of the work.
    """
    began = time.monotonic()
    return (min(max(LEAST_DELAY_S, (time.monotonic() - began) / 10), LONGEST_DELAY_S) for _ in itertools.count())
