"""What an update leaves on disk: the next bundle, the task's anchors, and the report beside the bundle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import ConfigError

from ..data.anchors import AnchorStore
from ..data.choice import AnchorPolicy
from ..data.examples import Example
from ..report.page import render_html
from ..runtime.files import replace_file
from ..update.result import UpdateResult


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
