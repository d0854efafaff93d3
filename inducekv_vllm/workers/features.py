"""What is known of a prompt while it is computed, and on its way to the host.

Shapes: d hidden size, H evidence of a gate, F features of a layer's values.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..bundle.lookup import QueryFeatures
from ..errors import InduceKVError
from ..host.device import HostCopy


@dataclass
class PromptFeatures:
    """Those of one request."""

    seen: int = 0  # tokens whose hidden states are in `total`
    total: Tensor | float = 0.0  # [d] float32, once a row has been seen
    key: HostCopy | None = None  # [d]
    evidence: HostCopy | None = None  # [H]
    picture: HostCopy | None = None  # [F]
    refusal: InduceKVError | None = None  # why nothing can be decided

    def add(self, hidden: Tensor) -> None:
        """Add the final hidden states [rows, d] of the prompt's next rows, in order."""
        self.total = self.total + hidden.float().sum(0)
        self.seen += len(hidden)

    def wait(self) -> QueryFeatures:
        """Wait for all of them. Raises InduceKVError: one is not finite, because the model overflowed."""
        if self.refusal is not None:
            raise self.refusal
        found = [None if copy is None else copy.wait() for copy in (self.key, self.evidence, self.picture)]
        if any(each is not None and not bool(each.isfinite().all()) for each in found):
            raise InduceKVError("the model's hidden states for this prompt are not finite, so it has no query key")
        key, evidence, picture = (None if each is None else each.numpy() for each in found)
        return QueryFeatures(key=key, evidence=evidence, picture=picture)
