"""Files that a command writes: where they can be, and atomic writes."""

from __future__ import annotations

import os
from pathlib import Path

from inducekv_vllm.errors import ConfigError


def require_output(path: Path, *, folder_is_made: bool = False) -> None:
    """Raises ConfigError: a file cannot be written at `path`.

    Args:
        folder_is_made: the folder is made, so that it may be missing.
    """
    if folder_is_made:
        there = next(parent for parent in path.absolute().parents if parent.exists())
        if not there.is_dir():
            raise ConfigError(f"output {path}: the folder {path.parent} cannot be made: {there} is no folder")
    elif not path.parent.is_dir():
        raise ConfigError(f"output {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ConfigError(f"output {path} is a folder, expected the name of a file")


def replace_file(path: Path, data: bytes) -> None:
    """Write `path` atomically and durably; raises OSError, and then `path` is unchanged."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
