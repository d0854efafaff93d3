"""The relevance gate decides whether a request uses the memory, and which task's entries it may retrieve.

Shapes: C tasks of the gate, d hidden size.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import ConfigError


@dataclass(frozen=True)
class GateDecision:
    """The gate's decision for one request."""

    task: str | None  # the task whose entries are retrieved; None if the gate is closed
    margins: npt.NDArray[np.float64]  # [C], in the order of the gate's tasks; open if one is at least 0


class RelevanceGate:
    """margin_c = <q_prefix, prefix_key_c> + <q_text, text_key_c> - threshold_c, in float64."""

    def __init__(self, keys: npt.ArrayLike, thresholds: npt.ArrayLike, tasks: tuple[str, ...]) -> None:
        """Create a gate for C tasks.

        Args:
            keys: [C, 2, d], finite; row 0 is compared with the prefix part of a query, row 1 with the text part.
            thresholds: [C], finite.
            tasks: C names.

        Raises:
            ConfigError: a shape is wrong or a number is not finite.
        """
        self.keys = np.array(keys, dtype=np.float64)  # [C, 2, d]
        self.thresholds = np.asarray(thresholds, dtype=np.float64)  # [C]
        self.tasks = tasks
        C = len(tasks)
        if self.keys.ndim != 3 or self.keys.shape[:2] != (C, 2) or self.thresholds.shape != (C,) or C == 0:
            raise ConfigError(
                f"a gate of {C} tasks needs keys [{C}, 2, d] and thresholds [{C}] with at least one task; "
                f"found {list(self.keys.shape)} and {list(self.thresholds.shape)}"
            )
        if not (np.isfinite(self.keys).all() and np.isfinite(self.thresholds).all()):
            raise ConfigError("the keys and thresholds of a gate must be finite")

    def decide(self, query: npt.ArrayLike, among: Collection[str] | None = None) -> GateDecision:
        """Pick the task with the largest margin (the first of equal ones), or none if every margin is below 0.

        Args:
            query: [2, d], the full-prefix mean and the text-token mean of the prompt.
            among: the tasks to pick from; None for all C.

        Raises:
            ConfigError: the query has the wrong shape or is not finite.
        """
        q = np.asarray(query, dtype=np.float64)
        if q.shape != self.keys.shape[1:] or not np.isfinite(q).all():
            raise ConfigError(
                f"the query key must be finite, of shape {list(self.keys.shape[1:])}; found shape {list(q.shape)}"
            )
        margins = np.einsum("cpd,pd->c", self.keys, q) - self.thresholds  # [C]
        allowed = np.array([among is None or task in among for task in self.tasks])  # [C]
        best = int(np.where(allowed, margins, -np.inf).argmax())
        return GateDecision(self.tasks[best] if allowed[best] and margins[best] >= 0 else None, margins)
