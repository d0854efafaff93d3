"""The settings of a gate's fit."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from ..runtime.settings import Flag, Seed, Settings

DEFAULT_MISSES: Final = 0.0
Misses = Annotated[
    float, Field(ge=0, le=0.5), Flag("share of a task's own questions that the gate may miss, to keep others out")
]


class GateSettings(Settings):
    """Of a gate that is fitted alone. Raises `ConfigError` for values out of range."""

    gate_misses: Misses = DEFAULT_MISSES
    seed: Seed = 0
