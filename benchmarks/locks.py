"""Files that one process at a time may lock; the lock ends with the process."""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

POLL_SECONDS = 0.1


class HeldElsewhere(RuntimeError):
    """Another process holds the file."""


@contextmanager
def locked(path: Path, patience: float | None = None) -> Iterator[BinaryIO]:
    """Opens and locks the file `path`. Raises HeldElsewhere: it stays locked for `patience` seconds (None: no end)."""
    with path.open("a+b") as file:
        deadline = math.inf if patience is None else time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HeldElsewhere(f"{path} is held by another process") from None
                time.sleep(POLL_SECONDS)
        yield file
