"""Sets of options for `python -m benchmarks.research.continual run`, as TOML.

`budget = [32, 64]` is `--budget 32 64`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from inducekv_vllm.errors import ConfigError

FOLDER = Path(__file__).parent
APPENDED = "set"  # an option that takes one value each time it is given


def preset_arguments(name: str, known: Collection[str]) -> list[str]:
    """The preset as arguments to stand before the user's own. Raises ConfigError: an option is not `known`."""
    path = FOLDER / f"{name}.toml"
    path = path if path.is_file() else Path(name)
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the preset: {error}") from error
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"{path}: there is no option {unknown[0]!r} to preset, there are: {', '.join(sorted(known))}")
    arguments: list[str] = []
    for option, value in options.items():
        values = [_text(path, option, v) for v in (value if isinstance(value, list) else [value])]
        flag = "--" + option.replace("_", "-")
        arguments += [part for v in values for part in (flag, v)] if option == APPENDED else [flag, *values]
    return arguments


def _text(path: Path, option: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{path}: {option} must be a text or a number, or several, found {value!r}")
    return str(value)
