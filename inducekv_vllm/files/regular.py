"""Regular files, opened: the open file is the one that is checked and used, whatever becomes of its name."""

import errno
import os
import stat


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, dir_fd: int | None = None) -> int:
    """Open a file, or with O_CREAT begin one that only its owner can read; returns the descriptor.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe or a device. `strerror` says which.
        ValueError: `path` cannot be the name of a file.
    """
    # A pipe would wait for its other end.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor
