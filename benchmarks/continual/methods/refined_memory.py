"""InduceKV by the practical recipe, `inducekv-select --recipe refined`, and its ablations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.continual.methods.memory import learn_memory, selector_settings
from benchmarks.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.continual.methods.query_keys import QueryKeyCache
from benchmarks.continual.suites import TaskData
from inducekv_vllm.page_terms import Weighting
from selector.data.choice import Policy
from selector.refined.lr_search import LEARNING_RATES
from selector.refined.settings import Allocation, Calibrate, Gating, RefinedSettings
from selector.refined.update import update_refined

DEFAULTS = RefinedSettings()


@dataclass(frozen=True)
class Refined:
    """The recipe with its own defaults, except that the number of tasks is given.

    `RefinedSettings` says what the fields mean.
    """

    kind: ClassVar[Kind] = "bundle"
    trials: ClassVar[tuple[Mapping[str, Any], ...]] = tuple({"learning_rate": rate} for rate in LEARNING_RATES)

    name: str = "refined"
    steps: int = DEFAULTS.steps
    batch_size: int = DEFAULTS.batch_size
    entries_per_task: int | None = None  # None: an equal share of the budget for every task of the stream
    entry_policy: Policy = DEFAULTS.entry_policy
    nested: bool = False  # such a share is never halved
    learning_rate: float | None = None  # None: searched for each task, on its validation split
    beta: float = DEFAULTS.beta
    calibrate: Calibrate = DEFAULTS.calibrate
    weighting: Weighting = DEFAULTS.weighting
    gate: Gating = DEFAULTS.gate
    allocation: Allocation = DEFAULTS.allocation
    payload_tokens: int = DEFAULTS.payload_tokens
    anchors_per_task: int = 64
    base: bool = True  # whether the gate is fitted to base questions too

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        share = max(1, context.budget // context.num_tasks)
        shared = replace(self, entries_per_task=self.entries_per_task or share)
        settings = selector_settings(RefinedSettings, shared, context)
        base = context.base if self.base else ()
        keys = QueryKeyCache(context.model)
        return learn_memory(
            lambda backbone, inputs, checkpoint: update_refined(
                backbone, inputs, settings, checkpoint, base=base, query_keys=keys
            ),
            self.anchors_per_task,
            task,
            previous,
            out,
            context,
        )


@dataclass(frozen=True)
class Unrefined(Refined):
    """Entries as extracted, with the starting calibration: there is nothing to search."""

    trials: ClassVar[tuple[Mapping[str, Any], ...]] = ()

    name: str = "refined_no_refinement"
    steps: int = 0
    learning_rate: float | None = LEARNING_RATES[0]  # of no step


ABLATIONS = (
    # Every question gets memory, and all entries compete by the prefix key, in training too.
    Refined("refined_no_gate", gate="none"),
    # Gate and routing from the prefix mean alone.
    Refined("refined_prefix_key", gate="prefix"),
    # k-center chooses the whole budget among old entries and new examples, and the others are evicted; a random choice
    # would evict nearly all old entries.
    Refined("refined_no_quotas", allocation="joint", entry_policy="k-center"),
    Unrefined(),
    # A gate needs prior weighting, so this has none: compare it with refined_no_gate.
    Refined("refined_sqrt", weighting="sqrt", gate="none"),
)
