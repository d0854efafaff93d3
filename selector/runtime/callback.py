"""What a program is told of a training as it goes."""

from __future__ import annotations

from typing import Any


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
