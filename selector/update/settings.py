"""The recipes' names, as bundles record them, and the settings of `inducekv-bundle build`."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field

from inducekv_vllm.bundle.metadata import Size
from inducekv_vllm.retrieval.entry_terms import MergedWeighting

from ..data.choice import Policy
from ..runtime.settings import Flag, Seed, Settings

BUILD: Final = "build"  # extraction alone
ROUTE: Final = "route"  # no entries, an adapter for each task
PAPER: Final = "paper"
REFINED: Final = "refined"
IMPORTED: Final = "imported"  # a memory that was trained elsewhere, or the keys and values of a text


class BuildSettings(Settings):
    """What to build. Raises `ConfigError` for values out of range."""

    budget: Annotated[Size, Flag("maximum number of entries")]  # B
    payload_tokens: Annotated[Size, Flag("tokens per entry and layer")] = 8  # m
    policy: Annotated[Policy, Flag("how entries are chosen")] = "random"
    weighting: Annotated[MergedWeighting, Flag("how retrieval weights enter attention")] = "sqrt"
    seed: Seed = 0
    batch_size: Annotated[int, Field(ge=1), Flag("examples extracted at once")] = 8  # affects speed and memory only
