"""What asks about a text while it is compacted: turns that repeat its parts, and that ask what its sentences say.

Each conversation stands behind the text, as a request of a user will, and all its tokens are queries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from inducekv_vllm.backbone.turns import message

from ..backbone.model import Backbone
from .chunks import chunks_of, sentences_of, spread

BEGINNING: Final = 8  # words of a part that name it
SUBJECT: Final = 5  # words of a sentence that are asked about
PART, LONG_PART = 64, 128  # tokens that are repeated in one turn, of a text and of a long one
LONG: Final = 4096  # tokens of a text
CONVERSATION: Final = 320  # tokens, about
AROUND: Final = 5  # tokens that a chat template puts around what is said, about


class Turn(NamedTuple):
    """What is asked about a text, and what it says."""

    asked: str
    said: str


def turns_about(backbone: Backbone, text: str, most: int, part: int = PART) -> tuple[list[Turn], list[Turn]]:
    """Those that repeat all of the text, and those that ask what its sentences say: of these `most` tokens or so.

    Args:
        part: tokens that are repeated in one turn.
    """
    asked = [Turn(about(sentence), sentence) for sentence in sentences_of(text)]
    asked = spread(asked, max(1, len(asked) * most // max(1, _tokens(backbone, asked))))
    return [Turn(repeat(each), each) for each in chunks_of(text, partial(count_of, backbone), part)], asked


def references(backbone: Backbone, *kinds: Sequence[Turn]) -> list[Tensor]:
    """The tokens of conversations, [T] int64 each.

    Turns that repeat and turns that ask are not in one: there an answer could be read off what was said before.
    """
    found = list[Tensor]()
    for turns in kinds:
        conversations = min(len(turns), math.ceil(_tokens(backbone, turns) / CONVERSATION))
        found += [conversation(backbone, _messages(turns[start::conversations])) for start in range(conversations)]
    return found


def about(sentence: str) -> str:
    """The question that a sentence answers."""
    return f"What does the text say about {' '.join(sentence.split()[:SUBJECT])}?"


def repeat(chunk: str) -> str:
    """The request for a piece of the text, named by how it begins."""
    first = next(iter(sentences_of(chunk)), chunk)
    return f'Repeat the part of the text that begins with "{" ".join(first.split()[:BEGINNING])}".'


def conversation(backbone: Backbone, messages: Sequence[Mapping[str, Any]]) -> Tensor:
    """The tokens of its turns, [T] int64."""
    text = backbone.chat_text(messages, generation_prompt=False)
    return torch.tensor(ids_of(backbone, text))


def _messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    return [message(role, said) for turn in turns for role, said in zip(("user", "assistant"), turn, strict=True)]


def _tokens(backbone: Backbone, turns: Sequence[Turn]) -> int:
    return sum(count_of(backbone, said) + AROUND for turn in turns for said in turn)


def ids_of(backbone: Backbone, text: str) -> list[int]:
    ids: list[int] = backbone.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def count_of(backbone: Backbone, text: str) -> int:
    return len(ids_of(backbone, text))
