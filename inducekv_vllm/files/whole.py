"""Files that are whole or absent, and files that one process at a time has."""

import contextlib
import fcntl
import glob
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`. On success, sync it and move it to `target`; otherwise remove it.

    What a process that was killed has left of the same target is removed first.
    """
    for left in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 16}.tmp"):
        _remove_abandoned(left)
    temporary, descriptor = _begun(target)
    try:
        yield temporary
        os.fsync(descriptor)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    _fsync(target.parent)  # the rename itself


def _begun(target: Path) -> tuple[Path, int]:
    """An empty file beside `target`, and its descriptor, which has it locked: it is written."""
    while True:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _lock(descriptor)
        if temporary.exists():
            return temporary, descriptor
        os.close(descriptor)  # somebody took it for abandoned before it was locked


def _remove_abandoned(temporary: Path) -> None:
    """Remove a file that nobody has locked: whoever wrote it was killed."""
    with contextlib.suppress(OSError):
        if (descriptor := lock_file(temporary)) is not None:
            temporary.unlink(missing_ok=True)
            os.close(descriptor)


def lock_file(path: Path, *, wait: bool = False) -> int | None:
    """Lock a file, which is made if it is missing, until the descriptor is closed or the process ends.

    Returns the descriptor, or None if another process has the lock and is not waited for.

    Raises:
        OSError: the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if _lock(descriptor, wait=wait):
        return descriptor
    os.close(descriptor)
    return None


def _lock(descriptor: int, *, wait: bool = False) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
