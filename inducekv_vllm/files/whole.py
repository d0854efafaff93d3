"""Files that are whole or absent, and files that one process at a time has."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`. On success, sync it and move it to `target`; otherwise remove it."""
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    temporary.open("xb").close()
    try:
        yield temporary
        _fsync(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _fsync(target.parent)  # the rename itself


def lock_file(path: Path, *, wait: bool = False) -> int | None:
    """Lock a file, which is made if it is missing, until the descriptor is closed or the process ends.

    Returns the descriptor, or None if another process has the lock and is not waited for.

    Raises:
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
