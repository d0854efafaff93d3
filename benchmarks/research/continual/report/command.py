"""The page and the JSON file about a run: `python -m benchmarks.research.continual report`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from inducekv_vllm.errors import ConfigError
from selector.runtime.files import replace_file

HTML, JSON = "report.html", "report.json"


def write_report(
    out: Path, model: Path | None = None, *, html: Path | None = None, json_file: Path | None = None
) -> dict[str, Any]:
    """Writes both files (default: into OUT), with the model where the run found it; returns the JSON content."""
    from benchmarks.research.continual.report.content import read_folder  # only a report needs matplotlib
    from benchmarks.research.continual.report.page import render_html

    content = read_folder(out, model)
    _write(html or out / HTML, render_html(content))
    _write(json_file or out / JSON, json.dumps(content, separators=(",", ":")) + "\n")
    return content


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("report", help="the page and the JSON file of a folder of streams, complete or not")
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--out", type=Path, help="the folder of the results")
    source.add_argument("--from-json", type=Path, metavar="FILE", help="an earlier report's JSON file: only the page")
    add("--html", type=Path, metavar="FILE", help=f"(default: OUT/{HTML}, or beside the JSON file)")
    add("--json", type=Path, metavar="FILE", help=f"(default: OUT/{JSON})")
    add("--model", type=Path, help="the model of the run (default: where the run found it)")
    parser.set_defaults(command=command)


def command(options: argparse.Namespace) -> int:
    """Prints the finding, and one JSON line with it and the files."""
    from benchmarks.research.continual.report.content import read_file
    from benchmarks.research.continual.report.page import render_html

    if options.from_json:
        if options.json or options.model:
            raise ConfigError("--from-json writes the page only, from that file only: of the others, give just --html")
        html, json_file = options.html or options.from_json.with_suffix(".html"), options.from_json
        content = read_file(json_file)
        _write(html, render_html(content))
    else:
        html, json_file = options.html or options.out / HTML, options.json or options.out / JSON
        content = write_report(options.out, options.model, html=html, json_file=json_file)
    print(content["finding"], file=sys.stderr)
    outcome = {name: content[name] for name in ("finding", "missing")}
    print(json.dumps({**outcome, "html": str(html), "json": str(json_file)}))
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the report: {error}") from error
