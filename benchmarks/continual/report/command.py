"""`python -m benchmarks.continual report (--out DIR | --from-json FILE)`: the page and the JSON file about a run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.continual.tuned import read_tuned
from inducekv_vllm.errors import ConfigError
from selector.runtime.files import replace_file

HTML, JSON = "report.html", "report.json"


def write_report(
    out: Path,
    model: Path | None = None,
    *,
    data: Path | None = None,
    tuned: Path | None = None,
    html: Path | None = None,
    json_file: Path | None = None,
) -> dict[str, Any]:
    """Writes both files (default: into OUT), with model and data where the run found them; returns the JSON content."""
    from benchmarks.continual.report.content import read_folder

    content = read_folder(out, model, data, None if tuned is None else read_tuned(tuned))
    _write_page(content, html or out / HTML)
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
    add("--data", type=Path, help="the suite's data (default: where the run found them)")
    add("--tuned", type=Path, metavar="FILE", help="results of a search, for the page")
    parser.set_defaults(command=command)


def command(options: argparse.Namespace) -> int:
    """Prints the finding, and one JSON line with it and the files."""
    from benchmarks.continual.report.content import read_file

    given = {"model": options.model, "data": options.data, "tuned": options.tuned}
    if options.from_json:
        if options.json or any(given.values()):
            raise ConfigError("--from-json writes the page only, from that file only: of the others, give just --html")
        html, json_file = options.html or options.from_json.with_suffix(".html"), options.from_json
        content = read_file(json_file)
        _write_page(content, html)
    else:
        html, json_file = options.html or options.out / HTML, options.json or options.out / JSON
        content = write_report(options.out, **given, html=html, json_file=json_file)
    print(content["finding"], file=sys.stderr)
    outcome = {name: content[name] for name in ("verdict", "finding", "missing")}
    print(json.dumps({**outcome, "html": str(html), "json": str(json_file)}))
    return 0


def _write_page(content: dict[str, Any], path: Path) -> None:
    from benchmarks.continual.report.page import render_html

    _write(path, render_html(content))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot write the report: {error}") from error
