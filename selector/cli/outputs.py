"""What an update leaves on disk: the next bundle, the task's anchors, and the report beside the bundle."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import ConfigError

from ..data.anchors import AnchorStore
from ..data.choice import AnchorPolicy
from ..data.examples import Example
from ..report.page import render_html
from ..runtime.distributed import is_main, together
from ..runtime.files import replace_file
from ..update.result import UpdateResult


@contextlib.contextmanager
def sole_writer(output: Path) -> Iterator[None]:
    """Inside, no other run writes this output; the lock ends with the process. Collective.

    Raises:
        ConfigError: another run is writing it, or the folder cannot be written.
    """
    path, lock = output.with_name(f".{output.name}.lock"), None
    with together():
        if is_main():
            lock = _locked(path, output)
    try:
        yield
    finally:
        if lock is not None:
            path.unlink(missing_ok=True)
            os.close(lock)


def _locked(path: Path, output: Path) -> int:
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot write there: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_ino == path.stat().st_ino:  # not one that a run which has just ended has removed
            return lock
    except OSError:
        pass
    os.close(lock)
    raise ConfigError(f"--output {output}: another run is writing it: wait for its end, or name another file")


def write_outputs(
    output: Path,
    result: UpdateResult,
    store: AnchorStore | None,
    anchors: Sequence[Example],
    policy: AnchorPolicy,
    seed: int,
    run_name: str,
) -> None:
    """Write the bundle, then the anchors, then the report; each file is whole or absent. Repeating it changes nothing.

    The bundle comes first, because the store must not hold anchors of a memory that was never written.

    Args:
        run_name: the run that the anchors belong to.

    Raises:
        BundleError, ConfigError: a file cannot be written; earlier files are there, later ones are unchanged.
    """
    write_bundle(result.bundle, output)
    storage: dict[str, Any] = {"memory_bytes": result.report["memory_bytes"], "anchor_bytes": 0, "anchors": 0}
    if store is not None:
        store.append(anchors, run=run_name, policy=policy, seed=seed)
        storage |= {"anchor_bytes": store.bytes(), "anchors": sum(task.count for task in store.tasks())}
    write_report(output, result.report | {"storage": storage})


def report_path(output: Path) -> Path:
    return output.with_name(f"{output.stem}.report.json")


def write_report(output: Path, report: dict[str, Any]) -> None:
    """As JSON, and as a page. Raises ConfigError: a file cannot be written."""
    path = report_path(output)
    try:
        replace_file(path, json.dumps(report, indent=1).encode())
        replace_file(path.with_suffix(".html"), render_html(report).encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the report: {error}") from error
