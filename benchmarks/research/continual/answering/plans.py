"""Which model gets which prompt, for each kind of artifact.

The rest of a method's inference (a gate's decision, retrieved exemplars, a copied answer) happens here, so that an
answerer only sends plain questions to a model.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from benchmarks.research.continual.methods import Artifact
from benchmarks.research.continual.methods.gated import GATE, read_gate
from benchmarks.research.continual.methods.neighbours import KEYS, Neighbours
from benchmarks.research.continual.methods.rehearsal import number_that_fit
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
        """The question with its exemplars before it: each its messages (but a system message), then its answer.

        Pictures stand in the order of their places; the example's own answer is kept, and used by nobody.
        """
        if not self.exemplars:
            return self.example
        messages: list[dict[str, Any]] = [m for m in self.example.messages if m["role"] == "system"]
        for exemplar in self.exemplars:
            messages += [m for m in exemplar.messages if m["role"] != "system"]
            messages.append(answer_turn(exemplar))
        messages += [m for m in self.example.messages if m["role"] != "system"]
        images = [path for part in (*self.exemplars, self.example) for path in part.images]
        digests = [f"{part.source_digest} {part.answer}" for part in self.exemplars]
        return Example(
            id=self.example.id,
            task=self.example.task,
            messages=tuple(messages),
            images=tuple(images),
            answer=self.example.answer,
            source_digest=hashlib.sha256("\n".join([*digests, self.example.source_digest]).encode()).hexdigest(),
        )


def answer_turn(example: Example) -> dict[str, Any]:
    """The example's answer as a turn of the conversation."""
    return {"role": "assistant", "content": [{"type": "text", "text": example.answer}]}


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
class Shown:
    """The nearest exemplars stand before the question, the nearest last; the untouched model answers."""

    scorer: Scorer
    neighbours: Neighbours
    exemplars: tuple[Example, ...]  # in the neighbours' order
    new_tokens: int = NEW_TOKENS  # that an answer may have

    def asks(self, examples: Sequence[Example]) -> list[Ask]:
        asks = []
        for example, rows in zip(examples, self.neighbours.nearest_to(self.scorer.backbone, examples), strict=True):
            room = self.scorer.context - self.new_tokens - self.scorer.prefix(example)["input_ids"].shape[1]
            count = number_that_fit((self.lengths[row] for row in rows), room)
            shown = tuple(self.exemplars[row] for row in reversed(rows[:count]))
            asks.append(Ask(example, with_artifact=False, exemplars=shown))
        return asks

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens that each exemplar adds before a question."""
        return [self._length(exemplar) for exemplar in self.exemplars]

    def _length(self, exemplar: Example) -> int:
        """Of its prefix, as the model sees it, and of the chat template's text from there to the next turn."""
        backbone, question = self.scorer.backbone, list(exemplar.messages)
        tokenizer = backbone.tokenizer
        ends = (
            backbone.chat_text([*question, answer_turn(exemplar)], generation_prompt=False),
            backbone.chat_text(question, generation_prompt=True),
        )
        whole, prefix = (len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ends)
        return int(self.scorer.prefix(exemplar)["input_ids"].shape[1]) + whole - prefix


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
