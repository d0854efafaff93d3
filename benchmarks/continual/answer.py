"""Asks questions of what a method has made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.continual.methods import Artifact
from benchmarks.continual.methods.adapter import merged
from benchmarks.demo.evaluate import normalise_answer
from inducekv_vllm.bundle import read_bundle
from selector.backbone import Backbone
from selector.data import Example
from selector.deployed import Deployed
from selector.objective import Scorer

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


@dataclass(frozen=True)
class OfflineAnswerer:
    """Greedy answers in transformers, in float32, a batch at a time."""

    model: Path
    batch_size: int = 64

    def prepare(self, artifact: Artifact, state: Path) -> Asked:
        backbone, bundle = Backbone.load(self.model), None
        if artifact.kind == "bundle":
            assert artifact.path is not None
            bundle = read_bundle(state / artifact.path)
        if artifact.kind == "adapter":
            assert artifact.path is not None
            merged(backbone, state / artifact.path)
        return OfflineModel(Deployed(Scorer(backbone, batch_size=self.batch_size), bundle))


@dataclass(frozen=True)
class OfflineModel:
    """A backbone, with a memory or as it stands."""

    deployed: Deployed

    def answers(self, examples: Sequence[Example]) -> list[str]:
        return self.deployed.answers(examples, MAX_NEW_TOKENS)


def is_right(answer: str, expected: str) -> bool:
    """Exact match after lower-casing and dropping surrounding space and final punctuation."""
    return normalise_answer(answer) == normalise_answer(expected)
