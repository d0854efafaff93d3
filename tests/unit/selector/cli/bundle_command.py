"""`inducekv-bundle` in the process of the tests."""

import contextlib
import io
from pathlib import Path

from inducekv_vllm.bundle import Bundle, write_bundle
from selector.cli.bundle import main


def written(bundle: Bundle, path: Path) -> Path:
    write_bundle(bundle, path)
    return path


def command(*arguments: object, status: int = 0) -> str:
    """Runs the command, which must end with this status; returns what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([str(argument) for argument in arguments]) == status
    return printed.getvalue()


def refuse(*arguments: object) -> str:
    """Runs the command, which must fail; returns the error, one line."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        command(*arguments, status=2)
    (line,) = [line for line in printed.getvalue().splitlines() if "Loading weights" not in line]
    assert line.startswith("inducekv-bundle: error: ")
    return line
