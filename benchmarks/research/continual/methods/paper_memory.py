"""InduceKV by the paper, `inducekv-select --recipe paper`, and its table "Single-factor ablation".

Compute. The paper takes 100 outer iterations of 10 inner steps, and on the first task its whole grid: minutes a
task on one core. Here it is 16 iterations of 2 inner steps with batches of 4, over a shortlist of twice the budget: on
the demo model some 20 seconds of one core a task with 32 entries, and 30 with 64, of which 12 go into extraction and
the report. The search tries values of beta and gamma, for the whole stream at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.research.continual.methods.memory import SelectedMemory, selector_settings
from benchmarks.research.continual.methods.method import RunContext
from selector.backbone.model import Backbone
from selector.paper.settings import PaperSettings
from selector.paper.update import update_paper
from selector.runtime.checkpoint import Checkpoint
from selector.runtime.running import Run
from selector.update.inputs import TaskInputs
from selector.update.result import UpdateResult

# Of the paper's grid, from little to much of both.
BETAS, GAMMAS = (0.1, 0.5, 1.0), (0.05, 0.1, 0.3)

DEFAULTS = PaperSettings()


@dataclass(frozen=True)
class Paper(SelectedMemory):
    """The recipe; `PaperSettings` says what the fields mean."""

    name: str = "paper"
    beta: float = 0.5
    gamma: float = 0.1
    iterations: int = 16
    inner_steps: int = 2
    outer_step: float = DEFAULTS.outer_step
    shortlist: int = 2  # times the budget
    batch_size: int = 4
    payload_tokens: int = DEFAULTS.payload_tokens
    anchors_per_task: int = 64

    def update(
        self, backbone: Backbone, inputs: TaskInputs, checkpoint: Checkpoint, context: RunContext
    ) -> UpdateResult:
        return update_paper(backbone, inputs, selector_settings(PaperSettings, self, context), Run(checkpoint))


@dataclass(frozen=True)
class WithoutAnchors(Paper):
    """beta = 0: nothing of the tasks before is in the objective."""

    name: str = "paper_no_anchors"
    beta: float = 0.0


@dataclass(frozen=True)
class WithoutCoverage(Paper):
    """gamma = 0."""

    name: str = "paper_no_coverage"
    gamma: float = 0.0


ABLATIONS = (
    WithoutAnchors(),
    WithoutCoverage(),
    # "w/o inner calibration (fix tau = 0.07, lambda = 0.5)", which is the "Fixed-tau,lambda variant" of the section
    # "Calibration-dynamics protocol" as well: one method for both.
    Paper("fixed_calibration", inner_steps=0),
)
