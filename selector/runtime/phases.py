"""Wall time and peak main memory of each phase of a run, as Linux counts them.

The time counts what earlier processes spent that were stopped, up to the last progress that they wrote.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkpoint import Checkpoint

_PROCESS = Path("/proc/self")


@dataclass
class Phases:
    """Records each phase's seconds and peak memory.

    If the system does not let the peak be reset, the record holds the process's peak so far, and says so.
    """

    checkpoint: Checkpoint | None = None  # of a run that may be resumed
    records: list[dict[str, Any]] = field(default_factory=list)
    _spent: dict[str, float] = field(default_factory=dict)  # by earlier processes

    def __post_init__(self) -> None:
        if self.checkpoint is not None:
            self._spent = self.checkpoint.seconds()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        reset = reset_peak()
        start, spent = time.perf_counter(), self._spent.get(name, 0.0)

        def seconds() -> float:
            return round(spent + time.perf_counter() - start, 3)

        if self.checkpoint is not None:
            self.checkpoint.clock.now = lambda: self._spent | {name: seconds()}
        yield
        self._spent[name] = seconds()
        peak, peak_of = status_bytes("VmHWM"), "phase" if reset else "process"
        self.records.append({"name": name, "seconds": self._spent[name], "peak_bytes": peak, "peak_of": peak_of})


def status_bytes(name: str) -> int:
    """A field of /proc/self/status in bytes: "VmRSS" is the resident memory, "VmHWM" its peak."""
    lines = (_PROCESS / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def reset_peak() -> bool:
    """Reset "VmHWM" to the resident memory now; returns whether the system allows it."""
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True
