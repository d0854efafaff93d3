"""What a memory of each size would lose: the dry run's table."""

from __future__ import annotations

from typing import Final

from inducekv_vllm.backbone.footprint import footprint_bytes

from ..backbone.model import Backbone
from ..update.inputs import TaskInputs
from .settings import DocumentSettings
from .text import compacted_text
from .update import products, texts_of, tokens_of_memory

SHARES: Final = (2, 4, 8, 16)


def costs(backbone: Backbone, inputs: TaskInputs, settings: DocumentSettings) -> dict[str, str]:
    """A line for each document and size, by name. Raises as `update_document` does."""
    texts, lines = texts_of(backbone, inputs), dict[str, str]()
    asked_for = tokens_of_memory(texts, settings)
    sizes = (backbone.hidden_size, backbone.num_layers, backbone.num_kv_heads)
    with products(backbone, settings):
        for text in texts:
            for m in sorted({asked_for, *(text.tokens // share for share in SHARES)}, reverse=True):
                size = footprint_bytes(1, *sizes, m, backbone.head_dim, backbone.value_dim)
                found = compacted_text(backbone, text, m)
                lines[f"{text.name}, {m} of {text.tokens} tokens"] = f"{size / 1e6:.2f} MB; {found}"
    return lines
