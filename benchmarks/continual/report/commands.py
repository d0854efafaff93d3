"""The commands that worked on a folder of streams, each with the machine it ran on: OUT/commands.jsonl."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine
from inducekv_vllm.errors import ConfigError
from selector.runtime.files import replace_file

COMMANDS = "commands.jsonl"


def record_command(out: Path, command: Sequence[str]) -> None:
    """Adds a command to OUT/commands.jsonl, once for each machine and versions that it ran with.

    Of paths outside the working directory only the last part is kept: where things lie is nobody's concern.

    Raises ConfigError: the file cannot be read or written.
    """
    arguments = [Path(argument).name if Path(argument).is_absolute() else argument for argument in command]
    record = {"command": shlex.join(arguments), "machine": describe_machine()}
    known = read_commands(out)
    if record in known:
        return
    lines = [json.dumps(one) + "\n" for one in (*known, record)]
    try:
        replace_file(out / COMMANDS, "".join(lines).encode())
    except OSError as error:
        raise ConfigError(f"{out / COMMANDS}: cannot write: {error}") from error


def read_commands(out: Path) -> list[dict[str, Any]]:
    """Those that are on record. Raises ConfigError: the file does not parse."""
    path = out / COMMANDS
    try:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a list of commands: {error}") from error
