"""What a call takes: CPU time, since the machine has other work, and the most memory that Linux saw meanwhile."""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inducekv_vllm.errors import MAX_MESSAGE, InduceKVError

MAX_SECONDS = 1.0
MAX_BYTES = 500 * 10**6
# An allocation beyond this fails. Without a limit, a huge one would end whatever process the machine chooses.
ROOM = 4 * 2**30
RESTING_BYTES = 50 * 2**20  # freed memory of a call that counts as used until it is given back, and would hide a peak


@dataclass(frozen=True)
class Outcome:
    value: Any  # what the call returned; None if it raised an error of ours
    error: InduceKVError | None
    seconds: float
    peak_bytes: int  # above what the process had


@dataclass
class Meter:
    """Calls functions that read files, and keeps what came of it."""

    outcomes: list[Outcome] = field(default_factory=list)
    used_bytes: int = field(default_factory=lambda: used_without_freed_memory())

    def call(self, function: Callable[..., Any], *arguments: Any) -> Outcome:
        """Any error that is not ours passes through."""
        if status_bytes("VmRSS") > self.used_bytes + RESTING_BYTES:
            self.used_bytes = used_without_freed_memory()
        before = resource.getrlimit(resource.RLIMIT_AS)
        value, error = None, None
        resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + ROOM, before[1]))
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM, the most memory, begins anew
        used, began = status_bytes("VmHWM"), time.process_time()
        try:
            value = function(*arguments)
        except InduceKVError as caught:
            error = caught.with_traceback(None)
        finally:
            seconds, peak = time.process_time() - began, status_bytes("VmHWM")
            resource.setrlimit(resource.RLIMIT_AS, before)
        self.outcomes.append(Outcome(value, error, seconds, peak - used))
        return self.outcomes[-1]

    def summary(self) -> str:
        """How many reads had which outcome, and what the worst of them took."""
        counts = Counter(type(o.error).__name__ if o.error else "read" for o in self.outcomes)
        kinds = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
        seconds = max(outcome.seconds for outcome in self.outcomes)
        peak = max(outcome.peak_bytes for outcome in self.outcomes)
        return f"{len(self.outcomes)} reads: {kinds}; at most {seconds:.2f} s and {peak / 1e6:.0f} MB"


def check(outcome: Outcome, error: type[InduceKVError]) -> None:
    """No other error than this, in words that can be shown, and within the limits."""
    assert outcome.seconds <= MAX_SECONDS, f"{outcome.seconds:.2f} s of CPU time"
    assert outcome.peak_bytes <= MAX_BYTES, f"{outcome.peak_bytes / 1e6:.0f} MB"
    if outcome.error is not None:
        message = str(outcome.error)
        assert isinstance(outcome.error, error), f"{type(outcome.error).__name__}: {message:.1000}"
        assert message.isprintable(), f"{message!r:.1000}"
        assert len(message) <= MAX_MESSAGE, f"{len(message)} characters: {message:.200}"


def used_without_freed_memory() -> int:
    """Gives freed memory back first: a call would take it again, unseen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """A size that Linux keeps of this process, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
