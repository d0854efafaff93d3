"""Query keys of the untouched model: the same questions have the same ones for every method, budget and seed.

Letters: N questions, d hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from selector.backbone.extraction import extract_query_keys
from selector.backbone.model import Backbone
from selector.data.examples import Example


@dataclass(frozen=True)
class KnownKeys:
    """Extracts the keys of a list of questions once in a process; the list as a whole, since rounding depends on it."""

    known: ClassVar[dict[tuple[Path, int, tuple[str, ...]], Tensor]] = {}

    model: Path  # the backbone's

    def __call__(
        self, backbone: Backbone, examples: Sequence[Example], *, batch_size: int, progress: bool = False
    ) -> Tensor:
        """[N, 2, d] float32, unit norm; raises as `extract_query_keys` does."""
        asked = (self.model, batch_size, tuple(example.source_digest for example in examples))
        if asked not in self.known:
            self.known[asked] = extract_query_keys(backbone, examples, batch_size=batch_size, progress=progress)
        return self.known[asked]
