"""A benchmark's command line, and its result: JSON with the command and the machine, printed and kept in a file."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from inducekv_vllm.files.whole import replacing


def parser_of(description: str | None, *, has_result: bool = True) -> argparse.ArgumentParser:
    """With `--output`, if there is a result to keep."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if has_result:
        parser.add_argument("--output", type=Path, help="write the result to this JSON file, too")
    return parser


def keep(result: Mapping[str, Any], output: Path | None) -> None:
    """Print a result, behind the command and the machine, and write it to `output` if there is one."""
    text = json.dumps({"command": command(), "machine": describe_machine(), **result}, indent=2)
    print(text)
    if output is not None:
        with replacing(output) as temporary:
            temporary.write_text(f"{text}\n")


def command() -> str:
    """What was run, as `python -m MODULE ARGUMENTS`."""
    spec = sys.modules["__main__"].__spec__
    module = sys.argv[0] if spec is None else f"-m {spec.name.removesuffix('.__main__')}"
    return f"python {module} {shlex.join(sys.argv[1:])}".rstrip()
