"""A process that is not to outlive the one that started it."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec a child must load nothing


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """The calling process gets this signal when the thread that started it has ended, SIGKILL included (Linux)."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(number))
