"""The settings of a gate's fit."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from ..runtime.settings import Flag, Seed, Settings

DEFAULT_MISSES: Final = 0.0  # of a gate of prototypes
TEXT_MISSES: Final = 0.05  # of one of classifiers
Misses = Annotated[
    Annotated[float, Field(ge=0, le=0.5)] | None,
    Flag(
        "share of a task's own questions that the gate may miss, to keep others out "
        f"(default: {TEXT_MISSES} for text in people's own words, {DEFAULT_MISSES:g} otherwise)"
    ),
]


class GateSettings(Settings):
    """Of a gate that is fitted alone. Raises `ConfigError` for values out of range."""

    gate_misses: Misses = None
    seed: Seed = 0
