"""The paper's recipe (Algorithm 1): entries are selected, with a calibration that all tasks share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inducekv_vllm.backbone.footprint import footprint_bytes

from ..update.recipe import Recipe
from ..update.settings import PAPER, TAUGHT
from .settings import PaperSettings

if TYPE_CHECKING:
    from ..backbone.model import Backbone
    from ..backbone.scoring import Scorer
    from ..runtime.running import Run
    from ..update.inputs import TaskInputs
    from ..update.result import UpdateResult


class PaperRecipe(Recipe[PaperSettings]):
    name = PAPER
    settings = PaperSettings
    takes = frozenset({"task", "validation", "anchors"})
    continues = frozenset({PAPER, TAUGHT})

    def check(self, inputs: TaskInputs, settings: PaperSettings) -> None:
        from .update import grid

        grid(inputs, settings)

    def update(self, backbone: Backbone, inputs: TaskInputs, settings: PaperSettings, run: Run) -> UpdateResult:
        from .update import update_paper

        return update_paper(backbone, inputs, settings, run)

    def costs(self, scorer: Scorer, inputs: TaskInputs, settings: PaperSettings) -> dict[str, str]:
        from .update import check_model

        check_model(scorer, inputs, settings)
        backbone = scorer.backbone
        sizes = (backbone.hidden_size, backbone.num_layers, backbone.num_kv_heads)
        size = footprint_bytes(settings.budget, *sizes, settings.payload_tokens, backbone.head_dim, backbone.value_dim)
        return {"memory": f"{size / 1e6:.2f} MB for all tasks together", "time": "not estimated for the paper's recipe"}
