"""The folder of a suite's data: made by one process at a time, and of one suite."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

from benchmarks.locks import locked
from inducekv_vllm.errors import ConfigError
from selector.runtime.files import replace_file

FACTS: Final = "suite.json"  # whose data a folder holds; written when they are whole


@contextmanager
def data_folder(folder: Path, suite: str, seed: int) -> Iterator[None]:
    """Holds `folder` for this process while it makes what is missing there, and reads it.

    Raises ConfigError: it has the data of another suite or seed, or the data cannot be written.
    """
    wanted = {"suite": suite, "seed": seed}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder / "lock"
        may_write = os.access(lock if lock.exists() else folder, os.W_OK)  # else it is only read
        with locked(lock) if may_write else nullcontext():
            found = _facts(folder / FACTS)
            if found not in (None, wanted):
                raise ConfigError(
                    f"{folder}: expected the data of {wanted}, found those of {found}; use another folder"
                )
            yield
            if found is None and may_write:
                replace_file(folder / FACTS, json.dumps(wanted).encode())
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write the data of {suite}: {error}") from error


def _facts(path: Path) -> object:
    """None: there are none."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path}: damaged: {error}; remove it") from error
