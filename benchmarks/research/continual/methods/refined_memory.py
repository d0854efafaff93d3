"""InduceKV by the practical recipe, `inducekv-select --recipe refined`, and its ablations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.research.continual.methods.memory import SelectedMemory, selector_settings
from benchmarks.research.continual.methods.method import RunContext
from inducekv_vllm.errors import ConfigError
from inducekv_vllm.retrieval.entry_terms import Form
from selector.backbone.model import Backbone
from selector.gate.data import GateData
from selector.refined.settings import ActivationChoice, FactsChoice, GatedWeighting, Precision, RefinedSettings
from selector.refined.update import update_refined
from selector.runtime.checkpoint import Checkpoint
from selector.runtime.running import Run
from selector.update.inputs import TaskInputs
from selector.update.result import UpdateResult

DEFAULTS = RefinedSettings(form="merged")


@dataclass(frozen=True)
class Refined(SelectedMemory):
    """The recipe with merged memory; the number of tasks is given, and every training takes all its steps.

    `RefinedSettings` says what the fields mean. Where a default follows the machine, or has changed since results were
    recorded, it is that of the recorded results.
    """

    name: str = "refined"
    steps: int = 400
    batch_size: int = 16
    entries_per_task: int | None = None  # None: an equal share of the budget for every task of the stream
    learning_rate: float | None = None  # None: searched for each task, on its validation split
    form: Form = DEFAULTS.form
    weighting: GatedWeighting = DEFAULTS.weighting
    gate_misses: float | None = DEFAULTS.gate_misses
    precision: Precision = "bfloat16"
    payload_tokens: int = DEFAULTS.payload_tokens
    anchors_per_task: int = 64
    facts: FactsChoice = "off"
    base: bool = True  # whether the gate is fitted to base questions too

    def update(
        self, backbone: Backbone, inputs: TaskInputs, checkpoint: Checkpoint, context: RunContext
    ) -> UpdateResult:
        settings = self.settings(backbone, context)
        inputs = replace(inputs, others=GateData(base=context.base if self.base else ()))
        return update_refined(backbone, inputs, settings, Run(checkpoint))

    def settings(self, backbone: Backbone, context: RunContext) -> RefinedSettings:
        share = max(1, context.budget // context.num_tasks)
        shared = replace(self, entries_per_task=self.entries_per_task or share)
        return selector_settings(RefinedSettings, shared, context).model_copy(update={"patience": None})


@dataclass(frozen=True)
class Unrefined(Refined):
    """Entries as extracted, with the starting calibration: there is nothing to search."""

    name: str = "refined_no_refinement"
    steps: int = 0
    learning_rate: float | None = 0.1  # of no step


@dataclass(frozen=True)
class Decoupled(Refined):
    """Decoupled memory: one entry a task, with maps of the attention output in a share of its bytes.

    Activation and learning rate are chosen for each task, on its validation split.
    """

    name: str = "refined_decoupled"
    weighting: GatedWeighting = "uniform"
    form: Form = "decoupled"
    activation: ActivationChoice = "search"
    map_share: float = 0.5  # of an entry's bytes; the rest are tokens

    def settings(self, backbone: Backbone, context: RunContext) -> RefinedSettings:
        if context.budget < context.num_tasks:
            raise ConfigError(
                f"the budget of {context.budget} is below one entry for each of {context.num_tasks} tasks"
            )
        tokens = context.budget // context.num_tasks * self.payload_tokens  # or maps of as many bytes
        rank = int(tokens * self.map_share) // (backbone.num_heads // backbone.num_kv_heads)
        left = tokens - rank * backbone.num_heads // backbone.num_kv_heads
        one_entry = replace(self, entries_per_task=1, payload_tokens=left)
        settings = selector_settings(RefinedSettings, one_entry, replace(context, budget=context.num_tasks))
        return settings.model_copy(update={"map_rank": rank})


@dataclass(frozen=True)
class DecoupledWithFacts(Decoupled):
    """And a task's text examples as facts, where validation says that this helps."""

    name: str = "refined_facts"
    facts: FactsChoice = "search"


ABLATIONS = (Decoupled(), DecoupledWithFacts(), Unrefined())
