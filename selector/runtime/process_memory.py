"""How much main memory this process uses, as Linux counts it."""

from __future__ import annotations

from pathlib import Path

_PROCESS = Path("/proc/self")


def status_bytes(name: str) -> int:
    """A line of /proc/self/status in bytes: "VmRSS" is what is resident, "VmHWM" the most that was."""
    lines = (_PROCESS / "status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def reset_peak() -> bool:
    """Lets "VmHWM" begin anew with what is resident now; returns whether the system permits it."""
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True
