"""What is asked of which model, for each kind of artifact.

Whatever a method needs at inference beside a model's forward passes (a gate's verdict, retrieved exemplars, a copied
answer) happens here, so that every answerer only ever asks plain questions of a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.continual.methods import Artifact
from selector.backbone import Backbone
from selector.data import Example


@dataclass(frozen=True)
class Ask:
    """One question, as a plan wants it put."""

    example: Example  # its answer is not to be used
    with_artifact: bool  # False: of the untouched model; True: of the artifact's model (bundle or adapter)
    exemplars: tuple[Example, ...] = ()  # stand before it as earlier turns of the conversation
    answer: str | None = None  # already known: nothing is asked of any model
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
            messages.append({"role": "assistant", "content": [{"type": "text", "text": exemplar.answer}]})
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


class Plan(Protocol):
    """Turns questions into what is to be asked."""

    def asks(self, examples: Sequence[Example]) -> list[Ask]:
        """One for each example, in their order."""
        ...


def plan(artifact: Artifact, state: Path, backbone: Backbone) -> Plan:
    """How the artifact of the state folder `state` answers.

    Args:
        backbone: the untouched model, for query keys.
    """
    return Plain(with_artifact=artifact.kind != "none")


@dataclass(frozen=True)
class Plain:
    """Every question goes as it is to the one model."""

    with_artifact: bool

    def asks(self, examples: Sequence[Example]) -> list[Ask]:
        return [Ask(example, self.with_artifact) for example in examples]
