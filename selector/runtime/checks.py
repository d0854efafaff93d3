"""Checks that settings share, so that the same mistake is told in the same words."""

from __future__ import annotations

import math
from typing import Any, get_args

from inducekv_vllm.errors import ConfigError


def require_at_least(least: int, **values: float | None) -> None:
    """Raises ConfigError: a number is below `least`, or not finite; None stands for a value that is not given."""
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise ConfigError(f"{name} must be a finite number, found {value}")
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}, found {value}")


def require_positive(**values: float | None) -> None:
    """Raises ConfigError: a number is not above 0, or not finite; None stands for a value that is not given."""
    for name, value in values.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be a positive number, found {value}")


def require_choice(kind: Any, **values: str) -> None:
    """Raises ConfigError: a value is none of those of the `Literal` type `kind`."""
    known = get_args(kind)
    for name, value in values.items():
        if value not in known:
            raise ConfigError(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, found {value!r}")
