"""The settings of the paper's recipe; the paper's values are the defaults."""

from typing import Annotated

from pydantic import Field

from inducekv_vllm.bundle.metadata import Size
from inducekv_vllm.retrieval.entry_terms import MergedWeighting

from ..runtime.settings import Flag, Seed, Settings


class SelectionSettings(Settings):
    """The bilevel optimisation (paper, Algorithm 1)."""

    budget: Annotated[Size, Flag("maximum number of entries; with --previous, its budget")] = 256  # B
    iterations: Annotated[int, Field(ge=0), Flag("outer steps")] = 100  # I
    inner_steps: Annotated[int, Field(ge=0), Flag("calibration steps before each outer step")] = 10  # J
    outer_step: Annotated[float, Field(gt=0)] = 0.1


class PaperSettings(SelectionSettings):
    """One task's update by the paper's recipe. Raises `ConfigError` for values out of range."""

    payload_tokens: Annotated[Size, Flag("tokens per entry and layer")] = 8  # m
    weighting: Annotated[MergedWeighting, Flag("how retrieval weights enter attention")] = "sqrt"
    # None: the value that the previous memory has fixed, else a grid search on the validation examples.
    beta: Annotated[
        float | None, Field(ge=0), Flag("weight of the anchors; paper: as the previous bundle has it, else searched")
    ] = None
    gamma: Annotated[
        float | None, Field(ge=0), Flag("weight of the coverage term; as the previous bundle has it, else searched")
    ] = None
    # Keep this many times B of the current task's candidates; None: all of them.
    shortlist: Annotated[int | None, Field(ge=1)] = 8
    batch_size: Annotated[int, Field(ge=1), Flag("examples per step")] = 8
    seed: Seed = 0
