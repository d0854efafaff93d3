"""The settings of a document's memory."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from inducekv_vllm.bundle.metadata import Size

from ..gate.settings import Misses
from ..refined.settings import Precision, usual_precision
from ..runtime.settings import Flag, Seed, Settings

DOCUMENT: Final = "document"


class DocumentSettings(Settings):
    """A document's memory. Raises `ConfigError` for values out of range."""

    share: Annotated[Size, Flag("tokens of the document for each one that its memory has", "TOKENS")] = 4
    payload_tokens: Annotated[Size | None, Flag("tokens of the memory in each layer; of a document's: by --share")] = (
        None
    )
    steps: Annotated[int, Field(ge=0), Flag("training steps, at most; of a document's, after compaction: all")] = 0
    gate_misses: Misses = None
    precision: Annotated[
        Precision,
        Field(default_factory=usual_precision),
        Flag("of matrix products (default: bfloat16 if the CPU has instructions for it, else float32)"),
    ]
    seed: Seed = 0
    asked: Annotated[int, Field(ge=0)] = 16  # pieces that the model asks itself about; from Python alone
