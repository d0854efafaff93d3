"""What a user wrote outside the repository, named as "module:NAME" on the command line."""

from __future__ import annotations

import importlib
from typing import Any

from inducekv_vllm.errors import ConfigError


def is_outside(name: str) -> bool:
    return ":" in name


def outside(name: str) -> Any:
    """The object of that name. Raises ConfigError: the module cannot be imported, or has no such name."""
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # the module's own code runs
        raise ConfigError(f"{name}: cannot import {module!r}: {type(error).__name__}: {error}") from error
    if not attribute or not hasattr(found, attribute):
        raise ConfigError(f"{name}: {module!r} has no {attribute!r}; expected MODULE:NAME")
    return getattr(found, attribute)
