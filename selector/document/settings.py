"""The settings of a document's memory."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from inducekv_vllm.bundle.metadata import Size
from inducekv_vllm.retrieval.entry_terms import Form

from ..gate.settings import Misses
from ..refined.settings import FactsChoice, Precision, usual_precision
from ..runtime.settings import Flag, Seed, Settings

DOCUMENT: Final = "document"
SHARE: Final = 16  # tokens of the document for one of the memory, unless it is said
Start = Literal["first", "pooled"]  # see `start.initial_memory`
STARTS: Final[tuple[Start, ...]] = ("first", "pooled")
FORMS: Final[tuple[Form, ...]] = ("merged", "decoupled")


class DocumentSettings(Settings):
    """A document's memory. Raises `ConfigError` for values out of range."""

    payload_tokens: Annotated[
        Size | None, Flag("tokens of the memory in each layer; of a document's: a sixteenth of the document's own")
    ] = None
    form: Annotated[
        Literal["merged", "decoupled", "search"],
        Flag("one softmax over memory and request, or a softmax of the memory's own"),
    ] = "search"
    steps: Annotated[int, Field(ge=0), Flag("training steps, at most")] = 300
    batch_size: Annotated[int, Field(ge=1), Flag("questions per step")] = 4
    learning_rate: Annotated[float | None, Field(gt=0), Flag("of the payloads (default: searched on validation)")] = (
        None
    )
    facts: Annotated[FactsChoice, Flag("keep exact values as facts beside memory, as validation says")] = "search"
    gate_misses: Misses = None
    precision: Annotated[
        Precision,
        Field(default_factory=usual_precision),
        Flag("of matrix products in training (default: bfloat16 if the CPU has instructions for it, else float32)"),
    ]
    seed: Seed = 0
    # What the self-study asks; from Python alone.
    start: Start | Literal["search"] = "search"
    chunk_tokens: Annotated[int, Field(ge=32)] = 256  # of a piece that is studied at once
    asked: Annotated[int, Field(ge=0)] = 2  # questions of each kind that the model asks about a piece
    clozes: Annotated[int, Field(ge=0)] = 6  # sentences of a piece with a word left out
    continuations: Annotated[int, Field(ge=0)] = 8  # sentences of a piece to be continued
    answer_tokens: Annotated[int, Field(ge=1)] = 48  # of an answer of the model, at most

    @property
    def patience(self) -> None:
        """All steps are taken."""
