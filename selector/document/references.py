"""What asks about a text while it is compacted: requests that repeat its pieces, and that ask what they say.

Each stands behind the text, as a request of a user will, and all its tokens are queries. Short questions are the turns
of one conversation, which is as long as a piece: so all references have about one length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from inducekv_vllm.backbone.turns import message

from ..backbone.model import Backbone
from .chunks import sentences_of, spread

BEGINNING: Final = 8  # words of a piece that name it
SUBJECT: Final = 5  # words of a sentence that are asked about
TURNS: Final = 8  # of a conversation
SENTENCES: Final = 24  # of the pieces, that are asked about, at most


def references(backbone: Backbone, pieces: Sequence[str]) -> list[Tensor]:
    """The tokens of each: [T] int64."""
    sentences = [sentence for piece in pieces for sentence in sentences_of(piece)]
    asked = [(about(sentence), sentence) for sentence in spread(sentences, SENTENCES)]
    turns = [[(repeat(piece), piece)] for piece in pieces]
    turns += [asked[start : start + TURNS] for start in range(0, len(asked), TURNS)]
    return [_tokens(backbone, each) for each in turns]


def about(sentence: str) -> str:
    """The question that a sentence answers."""
    return f"What does the text say about {' '.join(sentence.split()[:SUBJECT])}?"


def repeat(chunk: str) -> str:
    """The request for a piece of the text, named by how it begins."""
    first = next(iter(sentences_of(chunk)), chunk)
    return f'Repeat the part of the text that begins with "{" ".join(first.split()[:BEGINNING])}".'


def _tokens(backbone: Backbone, turns: Sequence[tuple[str, str]]) -> Tensor:
    messages = [message(role, said) for turn in turns for role, said in zip(("user", "assistant"), turn, strict=True)]
    text = backbone.chat_text(messages, generation_prompt=False)
    return torch.tensor(backbone.tokenizer(text, add_special_tokens=False)["input_ids"])
