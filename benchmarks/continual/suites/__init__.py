"""Suites by name. A suite is data: tasks in their default order, and base questions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from inducekv_vllm.errors import ConfigError

from . import demo
from .suite import Suite, TaskData

SUITES: Mapping[str, Callable[[Path], Suite]] = MappingProxyType({"demo": demo.load})

__all__ = ["SUITES", "Suite", "TaskData", "load_suite"]


def load_suite(name: str, data: Path) -> Suite:
    """The suite `name` from the folder `data`, where it is made first if it can be.

    Raises:
        ConfigError: there is no such suite.
        TaskDataError: its data cannot be read.
    """
    if name not in SUITES:
        raise ConfigError(f"there is no suite {name!r}, there are: {', '.join(SUITES)}")
    return SUITES[name](data)
