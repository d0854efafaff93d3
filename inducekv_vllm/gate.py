"""The relevance gate: whether a request has to do with what a memory knows, and with which of its tasks.

Letters: C tasks of the gate, d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .errors import ConfigError


@dataclass(frozen=True)
class Relevance:
    """The gate's verdict on one request."""

    task: str | None  # the task whose entries are retrieved; None: the gate is closed
    margins: npt.NDArray[np.float64]  # [C], in the order of the gate's tasks; open where one is at least 0


class RelevanceGate:
    """margin_c = <q_prefix, prefix_key_c> + <q_text, text_key_c> - threshold_c, in float64."""

    def __init__(self, keys: npt.ArrayLike, thresholds: npt.ArrayLike, tasks: tuple[str, ...]) -> None:
        """`keys` [C, 2, d] (row 0 meets the prefix part of a query, row 1 the text part) and `thresholds` [C], finite.

        Raises:
            ConfigError: other shapes, numbers that are not finite, or not one name for each task.
        """
        self.keys = np.asarray(keys, dtype=np.float64)  # [C, 2, d]
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

    def judge(self, query: npt.ArrayLike) -> Relevance:
        """The task of largest margin, the first of equal ones; none where every margin is below 0.

        Args:
            query: [2, d], the full-prefix mean and the text-token mean of the prompt.

        Raises:
            ConfigError: a query of another shape, or with NaN or inf.
        """
        q = np.asarray(query, dtype=np.float64)
        if q.shape != self.keys.shape[1:] or not np.isfinite(q).all():
            raise ConfigError(
                f"the query key must be finite, of shape {list(self.keys.shape[1:])}; found shape {list(q.shape)}"
            )
        margins = np.einsum("cpd,pd->c", self.keys, q) - self.thresholds  # [C]
        best = int(margins.argmax())
        return Relevance(self.tasks[best] if margins[best] >= 0 else None, margins)
