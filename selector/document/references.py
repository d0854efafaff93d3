"""What asks about a text while it is compacted: requests to repeat its pieces, and the pieces as answers.

Each stands behind the text, as a request of a user will, and all its tokens are queries. Questions beside them, made of
the text's sentences or asked by the model, gained nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from inducekv_vllm.backbone.turns import message

from ..backbone.model import Backbone
from .chunks import sentences_of

BEGINNING: Final = 8  # words of a piece that name it


def references(backbone: Backbone, pieces: Sequence[str]) -> list[Tensor]:
    """The tokens of each: [T] int64."""
    turns = [[message("user", repeat(piece)), message("assistant", piece)] for piece in pieces]
    texts = [backbone.chat_text(each, generation_prompt=False) for each in turns]
    return [torch.tensor(ids) for ids in backbone.tokenizer(texts, add_special_tokens=False)["input_ids"]]


def repeat(piece: str) -> str:
    """The request for a piece of the text, named by how it begins."""
    first = next(iter(sentences_of(piece)), piece)
    return f'Repeat the part of the text that begins with "{" ".join(first.split()[:BEGINNING])}".'
