"""A document's recipe: the frozen model studies it, and one entry is trained to answer without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inducekv_vllm.backbone.footprint import footprint_bytes
from inducekv_vllm.bundle import Bundle

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
        return {}

    def check(self, inputs: TaskInputs, settings: DocumentSettings) -> None:
        from .update import check_document

        check_document(inputs)

    def update(self, backbone: Backbone, inputs: TaskInputs, settings: DocumentSettings, run: Run) -> UpdateResult:
        from .update import update_document

        return update_document(backbone, inputs, settings, run)

    def costs(self, scorer: Scorer, inputs: TaskInputs, settings: DocumentSettings) -> dict[str, str]:
        from .kinds import ASKED
        from .update import check_previous, document_of, pieces_of, tokens_of, tokens_of_memory

        backbone, document = scorer.backbone, document_of(inputs)
        check_previous(backbone, inputs.previous, settings)
        num_tokens = len(tokens_of(backbone, document))
        m = tokens_of_memory(num_tokens, settings) if inputs.previous is None else inputs.previous.payload_tokens
        sizes = (backbone.hidden_size, backbone.num_layers, backbone.num_kv_heads)
        size = footprint_bytes(1, *sizes, m, backbone.head_dim, backbone.value_dim)
        pieces = len(pieces_of(backbone, document, settings))
        each = len(ASKED) * settings.asked + bool(settings.asked) + settings.clozes + settings.continuations
        return {
            "document": f"{document.name}: {num_tokens} tokens in {pieces} pieces, {pieces * each} questions at most",
            "memory": f"{m} tokens, {size / 1e6:.2f} MB, and a gate; the document's own keys and values would be "
            f"{num_tokens / m:.1f} times as many",
            "training": f"one of {settings.steps} steps finished at most; its duration is said before the first one",
        }
