"""How a training goes along: where its progress is kept, and who is told of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from .checkpoint import Checkpoint


class Callback:
    """Override what you need. Calls come from the thread that trains, and an exception ends the training.

    A training that resumes reports the steps that are still to be taken. Names of trainings say what they try, such as
    "generation, rate 0.1".
    """

    def on_step(self, training: str, step: int, loss: float) -> None:
        """After a step: its number from 1, and the mean NLL of its batch in nats."""

    def on_check(self, training: str, step: int, loss: float) -> None:
        """After the state was measured on validation questions: their mean NLL in nats."""

    def on_end(self, report: dict[str, Any]) -> None:
        """Of the whole update, with the content of its `report.json`."""


@dataclass(frozen=True)
class Run:
    checkpoint: Checkpoint | None = None  # None: no progress is kept
    progress: bool = False  # whether it is shown on standard error
    callbacks: Sequence[Callback] = ()  # are told of each step and of the end


ALONE: Final = Run()
