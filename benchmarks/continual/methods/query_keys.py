"""Query keys of the untouched model: the same questions have the same keys for every method, budget and seed.

Shapes: N questions, d hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from selector.backbone.extraction import extract_query_keys
from selector.backbone.model import Backbone
from selector.data.examples import Example

BATCH_SIZE = 64


@dataclass(frozen=True)
class QueryKeyCache:
    """Extracts the keys of a list of questions once in a process; the whole list, since rounding depends on it."""

    cached: ClassVar[dict[tuple[Path, int, tuple[str, ...]], Tensor]] = {}

    model: Path  # the folder of the untouched model
    load: Callable[[Path], Backbone] = Backbone.load  # called only if keys are missing

    def keys(self, examples: Sequence[Example]) -> Tensor:
        """[N, 2, d] float32, unit norm; raises as `extract_query_keys` does."""
        return self(None, examples, batch_size=BATCH_SIZE)

    def __call__(
        self, backbone: Backbone | None, examples: Sequence[Example], *, batch_size: int, progress: bool = False
    ) -> Tensor:
        """The same with the signature of `extract_query_keys`."""
        key = (self.model, batch_size, tuple(example.source_digest for example in examples))
        if key not in self.cached:
            backbone = backbone or self.load(self.model)
            self.cached[key] = extract_query_keys(backbone, examples, batch_size=batch_size, progress=progress)
        return self.cached[key]
