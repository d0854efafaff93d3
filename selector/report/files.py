"""A report beside its bundle: as JSON, and as a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from inducekv_vllm.errors import ConfigError

from ..runtime.files import replace_file
from .page import render_html


def report_path(output: Path) -> Path:
    """Of the JSON, for the bundle `output`; the page has the ending .html."""
    return output.with_name(f"{output.stem}.report.json")


def write_report(output: Path, report: dict[str, Any]) -> None:
    """Raises ConfigError: a file cannot be written."""
    path = report_path(output)
    try:
        replace_file(path, json.dumps(report, indent=1).encode())
        replace_file(path.with_suffix(".html"), render_html(report).encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the report: {error}") from error
