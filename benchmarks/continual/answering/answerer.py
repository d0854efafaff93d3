"""What every answerer is, and when an answer is right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.continual.methods import Artifact
from benchmarks.demo.evaluate import normalise_answer
from selector.data.examples import Example

MAX_NEW_TOKENS = 12


class Asked(Protocol):
    """A model that is ready to answer."""

    def answers(self, examples: Sequence[Example]) -> list[str]:
        """The text of the greedy answer to each; which task an example is of is not to be used."""
        ...


class Answerer(Protocol):
    """Where questions are asked: in this process, or of a server."""

    def prepare(self, artifact: Artifact, state: Path) -> Asked:
        """Make the artifact of the state folder `state` answer."""
        ...


def is_right(answer: str, expected: str) -> bool:
    """Exact match after lower-casing and dropping surrounding space and final punctuation."""
    return normalise_answer(answer) == normalise_answer(expected)
