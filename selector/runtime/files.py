"""Files that a command writes: where they can be, and atomic writes."""

import os
from pathlib import Path

from inducekv_vllm.errors import ConfigError
from inducekv_vllm.files.whole import replacing


def require_output(path: Path, *inputs: Path | None, folder_is_made: bool = False) -> None:
    """Raises ConfigError: a file cannot be written at `path`, or it is one of the inputs.

    Args:
        folder_is_made: the folder is made, so that it may be missing.
    """
    if os.path.realpath(path) in [os.path.realpath(each) for each in inputs if each is not None]:
        raise ConfigError(f"output {path} is one of the inputs, which stays as it is: name another file")
    if folder_is_made:
        there = next(parent for parent in path.absolute().parents if os.path.exists(parent))
        if not there.is_dir():
            raise ConfigError(f"output {path}: the folder {path.parent} cannot be made: {there} is no folder")
    elif not os.path.isdir(path.parent):
        raise ConfigError(f"output {path}: the folder {path.parent} does not exist")
    if os.path.isdir(path):  # False, too, of a name that is too long
        raise ConfigError(f"output {path} is a folder, expected the name of a file")


def replace_file(path: Path, data: bytes) -> None:
    """Write `path` atomically and durably; raises OSError, and then `path` is unchanged."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)
