"""What an update leaves on disk: the next bundle, the task's anchors, and the report beside the bundle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import ConfigError

from ..data.anchors import AnchorStore, Policy
from ..data.examples import Example
from ..report.page import render_html
from ..runtime.files import replace_file
from ..update.inputs import Update


def write_outputs(
    output: Path,
    done: Update,
    store: AnchorStore | None,
    anchors: Sequence[Example],
    policy: Policy,
    seed: int,
    run_name: str,
) -> None:
    """Write everything, each file whole or not at all; repeated, it changes nothing that is there.

    The bundle comes first: a store is only ever appended to, and must not hold anchors of a memory that never came.

    Args:
        run_name: of the run that the anchors are of.

    Raises:
        BundleError, ConfigError: a file cannot be written; those before it are there, those after it are as they were.
    """
    write_bundle(done.bundle, output)
    storage: dict[str, Any] = {"memory_bytes": done.report["memory_bytes"], "anchor_bytes": 0, "anchors": 0}
    if store is not None:
        store.append(anchors, run=run_name, policy=policy, seed=seed)
        storage |= {"anchor_bytes": store.bytes(), "anchors": sum(task.count for task in store.tasks())}
    write_report(output, done.report | {"storage": storage})


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
