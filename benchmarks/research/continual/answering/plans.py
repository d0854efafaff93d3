"""Which model gets which prompt, for each kind of artifact.

The rest of a method's inference (a gate's decision, retrieved exemplars, a copied answer) happens here, so that an
answerer only sends plain questions to a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from benchmarks.exemplars import KEYS, Exemplars, Neighbours, conversation
from benchmarks.research.continual.methods import Artifact
from benchmarks.research.continual.methods.gated import GATE, read_gate
from benchmarks.research.continual.suites.suite import NEW_TOKENS
from inducekv_vllm.bundle import Gate
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.backbone.token_values import evidence_of
from selector.data.anchors import AnchorStore
from selector.data.examples import Example


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


@dataclass(frozen=True)
class Ask:
    """One question with its model and its prompt."""

    example: Example  # its answer must not be used
    with_artifact: bool  # False: the untouched model; True: the artifact's model (bundle or adapter)
    exemplars: tuple[Example, ...] = ()  # stand before it as earlier turns of the conversation
    answer: str | None = None  # already known: no model is asked
    adapter: str | None = None  # with several adapters: the one of this folder below the artifact's path

    @property
    def conversation(self) -> Example:
        """The question with its exemplars before it."""
        return conversation(self.exemplars, self.example)


class Plan(Protocol):
    """Turns questions into prompts, each for one model."""

    def asks(self, examples: Sequence[Example]) -> list[Ask]:
        """One for each example, in their order."""
        ...


def plan(
    artifact: Artifact,
    state: Path,
    model: Path,
    load: Callable[[Path], Backbone] = Backbone.load,
    new_tokens: int = NEW_TOKENS,
) -> Plan:
    """How the artifact of a state folder answers; `load` is called with `model` if the model must see questions."""
    if artifact.kind in ("gated_adapter", "gated_adapters"):
        gate = read_gate(state / GATE)
        return Gated(load(model), gate, one_for_each_task=artifact.kind == "gated_adapters")
    if artifact.kind == "exemplars":
        assert artifact.path is not None
        exemplars = AnchorStore(state / artifact.path).read()
        return Shown(Scorer(load(model)), Neighbours.read(state / KEYS), tuple(exemplars), new_tokens)
    if artifact.kind == "copier":
        assert artifact.path is not None
        return Copied(load(model), Neighbours.read(state / artifact.path))
    return Plain(with_artifact=artifact.kind != "none")


@dataclass(frozen=True)
class Plain:
    """Every question goes to the one model as it is."""

    with_artifact: bool

    def asks(self, examples: Sequence[Example]) -> list[Ask]:
        return [Ask(example, self.with_artifact) for example in examples]


@dataclass(frozen=True)
class Gated:
    """If the gate is open, a question goes to the adapter, or to that of its task; otherwise to the untouched model."""

    backbone: Backbone
    gate: Gate
    one_for_each_task: bool

    def asks(self, examples: Sequence[Example]) -> list[Ask]:
        evidence = evidence_of(self.backbone, self.gate, examples)  # [n, H]
        rule = self.gate.rule
        tasks = [rule.decide(of_question).task for of_question in evidence.numpy()]
        return [
            Ask(example, with_artifact=task is not None, adapter=task if self.one_for_each_task else None)
            for example, task in zip(examples, tasks, strict=True)
        ]


@dataclass(frozen=True)
class Shown(Exemplars):
    """Exemplars stand before the question, and the untouched model answers."""

    def asks(self, examples: Sequence[Example]) -> list[Ask]:
        before = self.before(examples)
        return [Ask(e, with_artifact=False, exemplars=shown) for e, shown in zip(examples, before, strict=True)]


@dataclass(frozen=True)
class Copied:
    """The most common answer of the nearest examples, and of equally common ones the nearest; no model is asked."""

    backbone: Backbone
    neighbours: Neighbours

    def asks(self, examples: Sequence[Example]) -> list[Ask]:
        rows_of_each = self.neighbours.nearest_to(self.backbone, examples)
        nearest = [[self.neighbours.answers[row] for row in rows] for rows in rows_of_each]
        # Of equal counts Counter returns the first one, and the nearest come first.
        return [
            Ask(example, with_artifact=False, answer=Counter(answers).most_common(1)[0][0])
            for example, answers in zip(examples, nearest, strict=True)
        ]
