"""The recipe of documents: a few keys and values of each, which act like all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inducekv_vllm.bundle import Bundle
from inducekv_vllm.errors import UnsupportedModel

from ..update.recipe import Recipe
from .settings import DOCUMENT, DocumentSettings

if TYPE_CHECKING:
    from ..backbone.model import Backbone
    from ..backbone.scoring import Scorer
    from ..runtime.running import Run
    from ..update.inputs import TaskInputs
    from ..update.result import UpdateResult


class DocumentRecipe(Recipe[DocumentSettings]):
    name = DOCUMENT
    settings = DocumentSettings
    takes = frozenset({"document", "base", "background", "near_misses"})
    continues = frozenset({DOCUMENT})

    def inherited(self, previous: Bundle, given: Mapping[str, Any]) -> dict[str, Any]:
        steps = {"steps": previous.metadata.settings.get("steps", 0)}
        return steps if "share" in given else steps | {"payload_tokens": previous.payload_tokens}

    def check_model(self, model: str | Path) -> None:
        from inducekv_vllm.backbone.checkpoints import load_config

        from ..backbone.loading import merged_refusal

        if (found := merged_refusal(load_config(model)[0])) is not None:
            raise UnsupportedModel(f"{model}: a document's memory needs full attention in every layer, found {found}")

    def check(self, inputs: TaskInputs, settings: DocumentSettings) -> None:
        from .update import check_documents

        check_documents(inputs)

    def update(self, backbone: Backbone, inputs: TaskInputs, settings: DocumentSettings, run: Run) -> UpdateResult:
        from .update import update_document

        return update_document(backbone, inputs, settings, run)

    def costs(self, scorer: Scorer, inputs: TaskInputs, settings: DocumentSettings) -> dict[str, str]:
        from .update import sizes

        return sizes(scorer.backbone, inputs, settings)
