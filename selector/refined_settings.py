"""The settings of the refined recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inducekv_vllm.errors import ConfigError
from inducekv_vllm.retrieval import Weighting

from .refinement import Precision, RefinementSettings


@dataclass(frozen=True)
class RefinedSettings:
    """How to update by the refined recipe. Raises `ConfigError` for values out of range."""

    budget: int = 256  # B
    payload_tokens: int = 8  # m
    weighting: Weighting = "prior"
    entries_per_task: int = 4
    entry_policy: Literal["random", "k-center"] = "k-center"
    steps: int = RefinementSettings.steps
    batch_size: int = RefinementSettings.batch_size
    learning_rate: float | None = None  # None: searched on validation
    beta: float = RefinementSettings.beta  # weight of the anchors
    distillation: float = RefinementSettings.distillation
    calibrate: Literal["first", "every", "never"] = "first"
    precision: Precision = RefinementSettings.precision
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("budget", "payload_tokens", "entries_per_task"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.weighting != "prior":
            raise ConfigError(f'the refined recipe needs the weighting "prior", found {self.weighting!r}')
        if self.entry_policy not in ("random", "k-center"):
            raise ConfigError(f"the entry policy must be random or k-center, found {self.entry_policy!r}")
        if self.calibrate not in ("first", "every", "never"):
            raise ConfigError(f"calibrate must be first, every or never, found {self.calibrate!r}")
        self.refinement(RefinementSettings.learning_rate if self.learning_rate is None else self.learning_rate)

    def refinement(self, learning_rate: float) -> RefinementSettings:
        return RefinementSettings(
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=learning_rate,
            beta=self.beta,
            distillation=self.distillation,
            precision=self.precision,
            seed=self.seed,
        )
