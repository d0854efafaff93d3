"""The settings of the refined recipe."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from inducekv_vllm.bundle.activation import Activation
from inducekv_vllm.bundle.metadata import Size
from inducekv_vllm.retrieval.entry_terms import Form

from ..gate.settings import Misses
from ..runtime.cpu import has_bfloat16
from ..runtime.settings import Flag, Seed, Settings

GatedWeighting = Literal["prior", "uniform"]  # under "sqrt" the entries of other tasks would take attention too
Precision = Literal["bfloat16", "float32"]
ActivationChoice = Literal[Activation, "search"]
FactsChoice = Literal["search", "off"]


# Defaults of merged memory, of the settings in which they differ.
MERGED: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "payload_tokens": 8,
        "weighting": "prior",
        "activation": "prompt",
        "map_rank": 0,
        "entries_per_task": 4,
    }
)


def usual_precision() -> Precision:
    """Of training on this machine."""
    return "bfloat16" if has_bfloat16() else "float32"


class RefinedSettings(Settings):
    """One task's update by the refined recipe. Raises `ConfigError` for values out of range."""

    budget: Annotated[Size, Flag("maximum number of entries; with --previous, its budget")] = 256  # B
    payload_tokens: Annotated[Size, Flag("tokens per entry and layer, on average")] = 16
    # Decides the defaults of other settings: see `MERGED`.
    form: Annotated[Form, Flag("one softmax over memory and request, or a softmax of the memory's own")] = "decoupled"
    weighting: Annotated[GatedWeighting, Flag("how retrieval weights enter attention")] = "uniform"
    # Of the new task's memory; only decoupled memory may act later than from the prompt's start. "search": see
    # `candidates`.
    activation: Annotated[
        ActivationChoice,
        Flag("what memory acts on: the prompt, the text after the last picture, or the generation; or search"),
    ] = "search"
    # Of decoupled memory's entries, beside their tokens: low-rank maps of the attention output. See `shape`, too.
    map_rank: Annotated[
        int,
        Field(ge=0, lt=2**31),
        Flag("rank of an entry's map of the attention output, on average over layers; 0: none"),
    ] = 8
    facts: Annotated[FactsChoice, Flag("keep examples as facts, alone or beside memory, as validation says")] = "search"
    gate_misses: Misses = None
    entries_per_task: Annotated[int, Field(ge=1), Flag("of the budget, which must hold them")] = 1
    steps: Annotated[int, Field(ge=0), Flag("training steps, at most")] = 200
    batch_size: Annotated[int, Field(ge=1), Flag("examples per step")] = 4
    # Every 25 steps the validation loss is measured, and the best state is kept. None: all steps, and the last state.
    # A training ends after so many checks that gain nothing.
    patience: Annotated[int | None, Field(ge=1)] = 3
    # Muon's, of the payloads; it falls along a cosine. None: searched on the validation examples. With a
    # preconditioner it is that of tokens alone: see `training.MAP_RATE`.
    learning_rate: Annotated[
        float | None,
        Field(gt=0),
        Flag("of the payloads, but for the maps of wide models (default: searched on validation)"),
    ] = None
    # Of the model's matrix products in training; parameters stay float32.
    precision: Annotated[
        Precision,
        Field(default_factory=usual_precision),
        Flag("of matrix products in training (default: bfloat16 if the CPU has instructions for it, else float32)"),
    ]
    seed: Seed = 0

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_form(cls, values: Any) -> Any:
        return {**MERGED, **values} if values.get("form") == "merged" else values

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if self.form == "merged" and (self.weighting == "uniform" or self.activation != "prompt"):
            raise ValueError(
                "merged memory acts on the whole prompt and weights its entries by retrieval: "
                f"found the weighting {self.weighting!r} and the activation {self.activation!r}"
            )
        if self.form == "merged" and self.map_rank:
            raise ValueError(f"merged memory has no maps of the attention output, found map_rank {self.map_rank}")
        return self
