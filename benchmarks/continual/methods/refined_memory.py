"""InduceKV by the practical recipe, `inducekv-select --recipe refined`, and the same with one part taken away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.continual.methods.known_keys import KnownKeys
from benchmarks.continual.methods.memory import learn_memory, selector_settings
from benchmarks.continual.methods.method import Artifact, Circumstances, Kind
from benchmarks.continual.suites import TaskData
from inducekv_vllm.page_terms import Weighting
from selector.data.choice import Policy
from selector.refined.lr_search import LEARNING_RATES
from selector.refined.settings import Allocation, Calibrate, Gating, RefinedSettings
from selector.refined.update import update_refined


@dataclass(frozen=True)
class Refined:
    """The recipe with its own defaults, but for what is known here: how many tasks there will be.

    `RefinedSettings` says what the fields mean.
    """

    kind: ClassVar[Kind] = "bundle"
    trials: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"learning_rate": rate} for rate in LEARNING_RATES)

    name: str = "refined"
    steps: int = RefinedSettings.steps
    batch_size: int = RefinedSettings.batch_size
    entries_per_task: int | None = None  # None: an equal share of the budget for every task of the stream
    entry_policy: Policy = RefinedSettings.entry_policy
    nested: bool = False  # such a share is never halved
    learning_rate: float | None = None  # None: searched for each task, on its validation split
    beta: float = RefinedSettings.beta
    calibrate: Calibrate = RefinedSettings.calibrate
    weighting: Weighting = RefinedSettings.weighting
    gate: Gating = RefinedSettings.gate
    allocation: Allocation = RefinedSettings.allocation
    payload_tokens: int = RefinedSettings.payload_tokens
    anchors_per_task: int = 64
    base: bool = True  # whether the gate is shown base questions

    def learn(self, task: TaskData, previous: Path | None, out: Path, circumstances: Circumstances) -> Artifact:
        share = max(1, circumstances.budget // circumstances.num_tasks)
        shared = replace(self, entries_per_task=self.entries_per_task or share)
        settings = selector_settings(RefinedSettings, shared, circumstances)
        base = circumstances.base if self.base else ()
        keys = KnownKeys(circumstances.model)
        return learn_memory(
            lambda *given: update_refined(*given[:2], settings, given[2], base=base, query_keys=keys),
            self.anchors_per_task,
            task,
            previous,
            out,
            circumstances,
        )


@dataclass(frozen=True)
class Unrefined(Refined):
    """Entries as they were extracted, with the calibration that they start from: there is nothing to search."""

    trials: ClassVar[tuple[Mapping[str, Any], ...]] = ()

    name: str = "refined_no_refinement"
    steps: int = 0
    learning_rate: float | None = LEARNING_RATES[0]  # of no step


ABLATIONS = (
    # Every question gets memory, and all entries compete by the prefix key, while they are trained as well.
    Refined("refined_no_gate", gate="none"),
    # Gate and routing from the prefix mean alone.
    Refined("refined_prefix_key", gate="prefix"),
    # The budget goes to what is most spread among old entries and new examples; what is not chosen is evicted. A random
    # choice would evict nearly all that is held.
    Refined("refined_no_quotas", allocation="joint", entry_policy="k-center"),
    Unrefined(),
    # A gate needs prior weighting, so this goes without: to be held against refined_no_gate.
    Refined("refined_sqrt", weighting="sqrt", gate="none"),
)
