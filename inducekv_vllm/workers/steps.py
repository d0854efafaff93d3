"""When a worker's steps run, for what is done beside them."""

from __future__ import annotations

import math
import threading
import time
from typing import Final

STEPPING_S: Final = 0.1  # after a step the next one may follow
PATIENCE: Final = 0.1  # of a step, for which the next one may wait for the end of a load
IDLE_WAIT_S: Final = 0.02  # so long a load is waited for while there are no steps: it spares asking for it later
LONGEST_REST_S: Final = 0.02  # so long a load waits for the end of a step; beside a longer one it goes on
PIECE_S: Final = 0.005  # for so much CPU time, before it waits again


class Steps:
    """See the module docstring. One thread begins and ends them, any thread may ask."""

    def __init__(self) -> None:
        self._between = threading.Event()  # no step runs
        self._between.set()
        self._began = self._ended = -math.inf
        self._seconds = 0.0  # how long the last one took

    def begin(self) -> None:
        self._between.clear()
        self._began = time.monotonic()

    def end(self) -> None:
        self._ended = time.monotonic()
        self._seconds = self._ended - self._began
        self._between.set()

    @property
    def follow(self) -> bool:
        """Whether one runs, or the next may follow."""
        return not self._between.is_set() or time.monotonic() - self._ended < STEPPING_S

    @property
    def patience(self) -> float:
        """Seconds for which the next one may wait for the end of a load, if that is short."""
        return PATIENCE * self._seconds if self.follow else IDLE_WAIT_S

    def go_first(self) -> float:
        """Wait for the end of the step that runs, but not for long.

        Returns:
            For how much CPU time, in seconds, a load goes on beside it before it waits again; 0 if no step runs.
        """
        return 0.0 if self._between.wait(LONGEST_REST_S) else PIECE_S
