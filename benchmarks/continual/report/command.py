"""`python -m benchmarks.continual report --out DIR [--html FILE] [--json FILE]`, and what a run writes at its end."""

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
    """Writes both files (default: into OUT); returns what the JSON file holds.

    Args:
        model, data: None for where the run found them.
        tuned: what a search has found, to be told on the page.

    Raises:
        ConfigError: the folder cannot be read as one of a run, or a file cannot be written.
    """
    from benchmarks.continual.report.findings import read_findings
    from benchmarks.continual.report.page import as_json, render_html

    findings = read_findings(out, model, data, None if tuned is None else read_tuned(tuned))
    content = as_json(findings)
    for path, text in (
        (json_file or out / JSON, json.dumps(content, separators=(",", ":")) + "\n"),
        (html or out / HTML, render_html(findings)),
    ):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode())
        except OSError as error:
            raise ConfigError(f"{path}: cannot write the report: {error}") from error
    return content


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("report", help="the page and the JSON file of a folder of streams, complete or not")
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder of the results")
    add("--html", type=Path, metavar="FILE", help=f"(default: OUT/{HTML})")
    add("--json", type=Path, metavar="FILE", help=f"(default: OUT/{JSON})")
    add("--model", type=Path, help="the model of the run (default: where the run found it)")
    add("--data", type=Path, help="the suite's data (default: where the run found them)")
    add("--tuned", type=Path, metavar="FILE", help="what a search found, to be told on the page")
    parser.set_defaults(command=command)


def command(options: argparse.Namespace) -> int:
    """Ends in one JSON line: what was found, in words."""
    where = {"html": options.html or options.out / HTML, "json": options.json or options.out / JSON}
    content = write_report(
        options.out,
        options.model,
        data=options.data,
        tuned=options.tuned,
        html=where["html"],
        json_file=where["json"],
    )
    print(content["says"], file=sys.stderr)
    print(
        json.dumps(
            {name: content[name] for name in ("verdict", "says", "missing")} | {k: str(v) for k, v in where.items()}
        )
    )
    return 0
