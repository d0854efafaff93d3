"""Wall time and peak main memory of each phase of a run, as Linux counts them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PROCESS = Path("/proc/self")


@dataclass
class Phases:
    """Records each phase's seconds and peak memory.

    If the system does not let the peak be reset, the record holds the process's peak so far, and says so.
    """

    records: list[dict[str, Any]] = field(default_factory=list)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        reset = reset_peak()
        start = time.perf_counter()
        yield
        seconds, peak = round(time.perf_counter() - start, 3), status_bytes("VmHWM")
        peak_of = "phase" if reset else "process"
        self.records.append({"name": name, "seconds": seconds, "peak_bytes": peak, "peak_of": peak_of})


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
