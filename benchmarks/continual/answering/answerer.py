"""The interface of all answerers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.continual.methods import Artifact
from selector.data.examples import Example

MAX_NEW_TOKENS = 12


class AnsweringModel(Protocol):
    """A model that is ready to answer."""

    def answers(self, examples: Sequence[Example]) -> list[str]:
        """The text of the greedy answer to each; the example's task must not be used."""
        ...


class Answerer(Protocol):
    """Asks questions in this process, or over HTTP."""

    def prepare(self, artifact: Artifact, state: Path) -> AnsweringModel:
        """The model with the artifact of the state folder `state`."""
        ...
