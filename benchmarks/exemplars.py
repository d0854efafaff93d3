"""Stored examples that are found by their questions' keys, and stand before a question with their answers.

Shapes: n questions, N stored examples, d hidden size, k neighbours.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from benchmarks.question_keys import Key, question_keys
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example
from selector.runtime.files import replace_file

EXEMPLARS: Final = "exemplars"  # their folder
KEYS: Final = "keys.safetensors"


@dataclass(frozen=True)
class Neighbours:
    """Keys of N examples, of which kind, and the number of neighbours to use."""

    keys: Tensor  # [N, d] float16
    k: int
    key: Key = "paper"
    answers: tuple[str, ...] = ()  # [N], if the examples themselves are not stored

    @classmethod
    def none(cls, hidden_size: int, k: int, key: Key = "paper") -> Neighbours:
        """Nothing stored yet."""
        return cls(torch.zeros(0, hidden_size, dtype=torch.float16), k, key)

    @classmethod
    def before(cls, previous: Path | None, backbone: Backbone, k: int, key: Key) -> Neighbours:
        """Those of the state folder `previous`."""
        return cls.read(previous / KEYS) if previous else cls.none(backbone.hidden_size, k, key)

    def __len__(self) -> int:
        return len(self.keys)

    def nearest_to(self, backbone: Backbone, examples: Sequence[Example]) -> list[list[int]]:
        """Rows of the nearest to each of n questions: [n, min(k, N)]. `nearest` says in which order."""
        return self.nearest(question_keys(backbone, examples, self.key)).tolist()

    def nearest(self, queries: Tensor) -> Tensor:
        """Rows of the nearest to queries [n, d] float32 of unit norm: [n, min(k, N)] int64.

        The nearest comes first, and of equal ones the first stored.
        """
        scores = queries.float() @ self.keys.float().T  # [n, N]
        return scores.argsort(dim=1, descending=True, stable=True)[:, : self.k]

    def after(self, keys: Tensor, answers: Sequence[str] = ()) -> Neighbours:
        """With more examples after these; `keys` [n, d] of any float type."""
        return replace(self, keys=torch.cat([self.keys, keys.half()]), answers=(*self.answers, *answers))

    @property
    def stored_bytes(self) -> int:
        """Of the keys, and of the answers in UTF-8."""
        return self.keys.nbytes + sum(len(answer.encode()) for answer in self.answers)

    def write(self, path: Path) -> None:
        # In one piece: safetensors writes several metadata entries in any order.
        metadata = {"neighbours": json.dumps({"k": self.k, "key": self.key, "answers": self.answers})}
        replace_file(path, safetensors.torch.save({"keys": self.keys.contiguous()}, metadata=metadata))

    @classmethod
    def read(cls, path: Path) -> Neighbours:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = json.loads(file.metadata()["neighbours"])
            return cls(file.get_tensor("keys"), metadata["k"], metadata["key"], tuple(metadata["answers"]))


@dataclass(frozen=True)
class Exemplars:
    """The nearest exemplars stand before a question, the nearest last, as many as the model's context holds."""

    scorer: Scorer
    neighbours: Neighbours
    exemplars: tuple[Example, ...]  # in the neighbours' order
    new_tokens: int  # that an answer may have

    def before(self, examples: Sequence[Example]) -> list[tuple[Example, ...]]:
        """Those of each example."""
        found = []
        for example, rows in zip(examples, self.neighbours.nearest_to(self.scorer.backbone, examples), strict=True):
            room = self.scorer.context - self.new_tokens - self.scorer.prefix(example)["input_ids"].shape[1]
            count = number_that_fit((self.lengths[row] for row in rows), room)
            found.append(tuple(self.exemplars[row] for row in reversed(rows[:count])))
        return found

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


def conversation(exemplars: Sequence[Example], question: Example) -> Example:
    """The question with exemplars before it: each its messages (but a system message), then its answer.

    Pictures stand in the order of their places; the question's own answer is kept, and used by nobody.
    """
    if not exemplars:
        return question
    messages: list[dict[str, Any]] = [m for m in question.messages if m["role"] == "system"]
    for exemplar in exemplars:
        messages += [m for m in exemplar.messages if m["role"] != "system"]
        messages.append(answer_turn(exemplar))
    messages += [m for m in question.messages if m["role"] != "system"]
    images = [path for part in (*exemplars, question) for path in part.images]
    digests = [f"{part.source_digest} {part.answer}" for part in exemplars]
    return Example(
        id=question.id,
        task=question.task,
        messages=tuple(messages),
        images=tuple(images),
        answer=question.answer,
        source_digest=hashlib.sha256("\n".join([*digests, question.source_digest]).encode()).hexdigest(),
    )


def answer_turn(example: Example) -> dict[str, Any]:
    """The example's answer as a turn of the conversation."""
    return {"role": "assistant", "content": [{"type": "text", "text": example.answer}]}


def content_bytes(example: Example) -> int:
    """The stored size of an example: its pictures' files, and its questions' and answer's text in UTF-8.

    The paper's budget table counts a picture's JPEG bytes and 2048 bytes of text; these are the actual sizes.
    """
    parts = [part for message in example.messages for part in message["content"]]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    pictures = sum(path.stat().st_size for path in example.images)
    return pictures + sum(len(text.encode()) for text in (*texts, example.answer))


def number_that_fit(sizes: Iterable[int], allowed: int) -> int:
    """The number of sizes, from the first one on, whose sum is no more than `allowed`."""
    return sum(total <= allowed for total in accumulate(sizes))
