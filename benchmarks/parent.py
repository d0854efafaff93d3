"""A process that must not outlive its parent."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: between fork and exec a child must load nothing


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Sends this signal to the calling process when its parent's thread ends, however it ends (Linux)."""
    _LIBC.prctl(PR_SET_PDEATHSIG, int(number))
