"""The command: see the package."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.continual.diagnostics.drawing import png
from benchmarks.continual.diagnostics.framework import Diagnostic, add_common_arguments, find_diagnostics
from benchmarks.continual.results import Finished
from inducekv_vllm.errors import ConfigError, InduceKVError
from selector.runtime.files import replace_file

PROGRAM = "python -m benchmarks.continual.diagnostics"
REQUIRED = ("diagnostic", "source", "says")


def main(arguments: Sequence[str] | None = None) -> int:
    diagnostics = find_diagnostics()
    options = _parser(diagnostics).parse_args(arguments)
    try:
        print(json.dumps(run(options, diagnostics[options.diagnostic])))
    except InduceKVError as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace, diagnostic: Diagnostic) -> dict[str, Any]:
    """Measures, draws and writes; returns what is said, and where the files are."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    found = as_json(diagnostic.measure(Finished.read(options.out, options.model, options.data), options))
    assert all(name in found for name in REQUIRED), f"{options.diagnostic} must give {', '.join(REQUIRED)}"
    path = options.out / "diagnostics" / f"{options.name or options.diagnostic}.json"
    write(path, found, png(diagnostic.plot, found))
    return {name: found[name] for name in REQUIRED} | {"files": [str(path), str(path.with_suffix(".png"))]}


def write(path: Path, found: dict[str, Any], picture: bytes) -> None:
    """The JSON last: where it is, its picture is too.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path.with_suffix(".png"), picture)
        replace_file(path, (json.dumps(found, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot write what was found: {error}") from error


def as_json(value: Any) -> Any:
    """As it is read back from JSON, numbers with six significant digits; what is not a finite number is None."""
    if isinstance(value, dict):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def _parser(diagnostics: dict[str, Diagnostic]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Explains the numbers of a finished run.")
    commands = parser.add_subparsers(dest="diagnostic", required=True, metavar="NAME")
    for name, diagnostic in diagnostics.items():
        text = diagnostic.__doc__ or ""
        one = commands.add_parser(
            name,
            help=text.partition("\n")[0].replace("%", "%%"),
            description=text.replace("%", "%%"),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_common_arguments(one)
        one.add_argument("--threads", type=int, default=0, help="of torch (default: its own choice)")
        one.add_argument("--name", help="of the files that are written (default: the diagnostic's)")
        if hasattr(diagnostic, "add_arguments"):
            diagnostic.add_arguments(one)
    return parser


if __name__ == "__main__":
    sys.exit(main())
