"""A text, compacted, as `inducekv-bundle import` takes it: without questions and gate."""

from __future__ import annotations

from pathlib import Path

from inducekv_vllm.errors import ConfigError

from ..backbone.model import Backbone
from ..imported.prefix import Prefix
from ..imported.source import Source, sha256_of
from .reading import document_of
from .text import ReadText, Text, compacted_text


def compacted_source(path: Path, share: int) -> Source:
    """One token for `share` of the text's. Raises TaskDataError: it cannot be read."""
    document = document_of(path, path.stem)

    def prefix(backbone: Backbone) -> Prefix:
        """Raises ConfigError: no token is left. TaskDataError: it is no document."""
        text = Text.of(backbone, document)
        if not (tokens := text.tokens // share):
            raise ConfigError(f"{path}: a share of {share} leaves none of {text.tokens} tokens")
        found = compacted_text(backbone, ReadText.of(backbone, text), tokens)
        return Prefix(found.keys, found.values)

    return Source(sha256_of(path), {"source": "text", "share": share}, prefix)
