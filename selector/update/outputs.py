"""What an update leaves on disk: the next bundle, the task's anchors, and the report beside the bundle."""

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.files.whole import lock_file

from ..data.anchors import AnchorStore
from ..data.examples import Example
from ..runtime.files import replace_file
from .result import UpdateResult


@contextlib.contextmanager
def sole_writer(output: Path) -> Iterator[None]:
    """Inside, its folder is there, and no other run writes this output; the lock ends with the process.

    Raises:
        ConfigError: another run is writing it, or the folder cannot be written.
    """
    path = output.with_name(f".{output.name}.lock")
    lock = _locked(path, output)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _locked(path: Path, output: Path) -> int:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_file(path)
    except OSError as error:
        raise ConfigError(f"output {output}: cannot write there: {error.strerror}") from error
    if lock is not None:
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):  # not of a file that a run has removed at its end
                return lock
        os.close(lock)
    raise ConfigError(f"output {output}: another run is writing it: wait for its end, or name another file")


def write_outputs(output: Path, result: UpdateResult, store: AnchorStore | None, anchors: Sequence[Example]) -> None:
    """Write the bundle, then the anchors, then the report; each file is whole or absent. Repeating it changes nothing.

    The bundle comes first, because the store must not hold anchors of a memory that was never written.

    Raises:
        BundleError, ConfigError: a file cannot be written; earlier files are there, later ones are unchanged.
    """
    write_bundle(result.bundle, output)
    storage: dict[str, Any] = {"memory_bytes": result.report["memory_bytes"], "anchor_bytes": 0, "anchors": 0}
    if store is not None:
        store.append(anchors)
        storage |= {"anchor_bytes": store.bytes(), "anchors": sum(task.count for task in store.tasks())}
    write_report(output, result.report | {"storage": storage})


def report_path(output: Path) -> Path:
    """Beside the bundle `output`."""
    return output.with_name(f"{output.stem}.report.json")


def write_report(output: Path, report: dict[str, Any]) -> None:
    """Raises ConfigError: the file cannot be written."""
    path = report_path(output)
    try:
        replace_file(path, json.dumps(report, indent=1).encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the report: {error}") from error
