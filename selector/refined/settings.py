"""The settings of the refined recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from inducekv_vllm.errors import ConfigError
from inducekv_vllm.page_terms import Weighting

from ..runtime.checks import require_at_least, require_choice
from ..update.build import Policy
from .training import Precision, RefinementSettings

Allocation = Literal["quotas", "joint"]
Calibrate = Literal["first", "every", "never"]
Gating = Literal["two-part", "prefix", "none"]


@dataclass(frozen=True)
class RefinedSettings:
    """How to update by the refined recipe. Raises `ConfigError` for values out of range."""

    budget: int = 256  # B
    payload_tokens: int = 8  # m
    weighting: Weighting = "prior"
    # Which questions get memory: those that a gate lets in, by the whole query key or by its prefix part alone, and
    # then their task's entries; or, with "none", every question, and then all entries, told apart by their keys alone.
    gate: Gating = "two-part"
    # "joint" is without quotas: the entries are chosen over all tasks together, those held and the arriving ones; what
    # is not chosen is evicted, and what stays is not trained again.
    allocation: Allocation = "quotas"
    entries_per_task: int = 4  # under quotas
    entry_policy: Policy = "random"
    nested: bool = True  # train every half of a quota to do alone, for when quotas are halved; under quotas
    steps: int = RefinementSettings.steps
    batch_size: int = RefinementSettings.batch_size
    learning_rate: float | None = None  # None: searched on validation
    beta: float = RefinementSettings.beta  # weight of the anchors
    distillation: float = RefinementSettings.distillation
    calibrate: Calibrate = "first"
    precision: Precision = RefinementSettings.precision
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(
            1, budget=self.budget, payload_tokens=self.payload_tokens, entries_per_task=self.entries_per_task
        )
        require_choice(Weighting, weighting=self.weighting)
        require_choice(Gating, gate=self.gate)
        require_choice(Allocation, allocation=self.allocation)
        require_choice(Policy, entry_policy=self.entry_policy)
        require_choice(Calibrate, calibrate=self.calibrate)
        if self.nested and self.allocation != "quotas":
            raise ConfigError("nested training is for halved quotas; an allocation without quotas needs nested=False")
        if self.gate != "none" and self.weighting != "prior":
            raise ConfigError(f'a memory with a gate needs the weighting "prior", found {self.weighting!r}')
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
