"""The settings of a gate's fit."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Protocol

from pydantic import Field

from inducekv_vllm.bundle import Gate

from ..runtime.settings import Flag, Seed, Settings

DEFAULT_MISSES: Final = 0.0  # of a gate of prototypes
TEXT_MISSES: Final = 0.05  # of one of classifiers, at least
Kind = Literal["prototypes", "classifiers"]
GateKind = Annotated[
    Kind | None,
    Flag(
        "classifiers tell people's own words apart, and are for text alone; prototypes find a form with places to fill "
        "(default: by the questions of the tasks; gate-fit: as the bundle has)"
    ),
]
Misses = Annotated[
    Annotated[float, Field(ge=0, le=0.5)] | None,
    Flag(
        "share of a task's own questions that the gate may miss, to keep others out "
        f"(default: {DEFAULT_MISSES:g} of prototypes; {TEXT_MISSES} of classifiers, or up to 0.2 while more than 0.02 "
        "of everyday requests would open it)"
    ),
]


class GateSettings(Settings):
    """Of a gate that is fitted alone. Raises `ConfigError` for values out of range."""

    gate_kind: GateKind = None
    gate_misses: Misses = None
    seed: Seed = 0


class FitsGate(Protocol):
    """Settings that a gate is fitted with, among others."""

    @property
    def gate_kind(self) -> Kind | None: ...

    @property
    def gate_misses(self) -> float | None: ...

    @property
    def seed(self) -> int: ...


def fit_options(settings: FitsGate) -> dict[str, Any]:
    """The arguments of `selector.gate.fit.fit_gate` that settings decide."""
    return {"misses": settings.gate_misses, "seed": settings.seed, "kind": settings.gate_kind}


def kind_of(gate: Gate) -> Kind:
    """That of a gate which is fitted again, unless another is asked for."""
    return "classifiers" if gate.classified else "prototypes"
