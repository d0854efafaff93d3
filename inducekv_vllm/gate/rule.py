"""From the evidence of a prompt to a task, or to none.

Shapes: C tasks of the gate, H prototypes.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError

# Why a gate stays closed. "outside": less than `ALIKE` of what can speak for a task is there, for any of them.
# "below_threshold": enough is, and other parts speak against it.
Closed = Literal["outside", "below_threshold"]
ALIKE: Final = 0.2  # own questions have about 0.4, everyday requests 0.14


@dataclass(frozen=True)
class GateDecision:
    """The gate's decision for one request."""

    task: str | None  # the task whose entries are retrieved; None if the gate is closed
    margins: npt.NDArray[np.float64]  # [C], in the order of the gate's tasks; open if one is at least 0
    closed: Closed | None = None  # why it is closed; None if it is open
    fact_tasks: tuple[str, ...] = ()  # whose facts count, if the prompt's words name one


class RelevanceGate:
    """margin_c = <weights_c, evidence> - threshold_c, in float64.

    Evidence is between 0 and 1, and every threshold is above 0. So what is like nothing that the gate was fitted to,
    and has no evidence, opens nothing.

    A fact has a second witness: the prompt names the thing that it is about. So the facts of a task count where the
    gate is closed, too, if the margin reaches the task's `near`.
    """

    def __init__(
        self,
        weights: npt.ArrayLike,
        thresholds: npt.ArrayLike,
        tasks: tuple[str, ...],
        near: tuple[float, ...] | None = None,
    ) -> None:
        """Create a gate for C tasks.

        Args:
            weights: [C, H], finite.
            thresholds: [C], finite and above 0, or it would open for everything.
            tasks: C names.
            near: [C], at most 0; None for 0.
        """
        self.weights = np.array(weights, dtype=np.float64)  # [C, H]
        self.thresholds = np.asarray(thresholds, dtype=np.float64)  # [C]
        self.tasks = tasks
        self.near = np.zeros(len(tasks)) if near is None else np.asarray(near, dtype=np.float64)  # [C]

    def decide(self, evidence: npt.ArrayLike, among: Collection[str] | None = None) -> GateDecision:
        """Pick the task with the largest margin (the first of equal ones), or none if every margin is below 0.

        Args:
            evidence: [H], from 0 to 1.
            among: the tasks to pick from; None for all C.

        Raises:
            ConfigError: the evidence is not finite.
        """
        found = np.asarray(evidence, dtype=np.float64)
        if not np.isfinite(found).all():
            raise ConfigError("the evidence of a gate must be finite")
        margins = self.weights @ found - self.thresholds  # [C]
        allowed = np.array([among is None or task in among for task in self.tasks])  # [C]
        best = int(np.where(allowed, margins, -np.inf).argmax())
        if allowed[best] and margins[best] >= 0:
            return GateDecision(self.tasks[best], margins, fact_tasks=(self.tasks[best],))
        speaking_for = np.maximum(self.weights, 0)  # [C, H]
        likeness = speaking_for @ found / np.maximum(speaking_for.sum(axis=1), np.finfo(np.float64).tiny)  # [C]
        closed: Closed = "outside" if likeness[allowed].max(initial=0) < ALIKE else "below_threshold"
        near = tuple(self.tasks[row] for row in np.flatnonzero(allowed & (margins >= self.near)))
        return GateDecision(None, margins, closed, near)
