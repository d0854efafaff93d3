"""How a gate is fitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal, Protocol

from pydantic import Field

from inducekv_vllm.bundle import Gate

from ..runtime.settings import Flag, Settings

DEFAULT_MISSES: Final = 0.0  # of a gate of prototypes
TEXT_MISSES: Final = 0.05  # of one of classifiers, at least
Kind = Literal["prototypes", "classifiers"]
Misses = Annotated[
    Annotated[float, Field(ge=0, le=0.5)] | None,
    Flag(
        "share of a task's own questions that the gate may miss, to keep others out "
        f"(default: {DEFAULT_MISSES:g} of prototypes; {TEXT_MISSES} of classifiers, or up to 0.2 while more than 0.02 "
        "of everyday requests would open it)"
    ),
]


class GateSettings(Settings):
    """Of `inducekv-bundle gate-fit`. Raises `ConfigError` for values out of range."""

    gate_kind: Annotated[
        Kind | None,
        Flag(
            "classifiers tell people's own words apart, and are for text alone; prototypes find a form with places to "
            "fill (default: as the bundle has, or by the questions)"
        ),
    ] = None
    gate_misses: Misses = None


class FitsGate(Protocol):
    """Settings of a recipe whose memories have a gate."""

    @property
    def gate_misses(self) -> float | None: ...

    @property
    def seed(self) -> int: ...

    @property
    def precision(self) -> Literal["bfloat16", "float32"]: ...


@dataclass(frozen=True)
class GateOptions:
    """What decides a fit beside its data."""

    # Share of the tasks' questions that the gate may miss, of those that it was not fitted to; None: by its kind.
    misses: float | None = None
    seed: int = 0
    kind: Kind | None = None  # None: see `selector.gate.fit.suitable_kind`
    # Whose values it looks at, ascending; None: `selector.backbone.token_values.layers_of_gate`. A request of a gate
    # that looks at later ones waits longer for its decision, and less memory can join its pass.
    layers: tuple[int, ...] | None = None
    in_bfloat16: bool = False  # the model's matrix products while it reads the questions

    @classmethod
    def of(cls, settings: FitsGate) -> GateOptions:
        return cls(settings.gate_misses, settings.seed, in_bfloat16=settings.precision == "bfloat16")

    @classmethod
    def again(cls, settings: GateSettings, gate: Gate | None) -> GateOptions:
        """For a gate in the place of this one, if there is one: it looks at the same layers."""
        if gate is None:
            return cls(settings.gate_misses, kind=settings.gate_kind)
        kind: Kind = "classifiers" if gate.classified else "prototypes"
        return cls(settings.gate_misses, kind=settings.gate_kind or kind, layers=gate.layers)
