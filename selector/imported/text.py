"""A text as memory: the keys and values of its own tokens, as in front of a request."""

from __future__ import annotations

from pathlib import Path

import torch

from inducekv_vllm.errors import TaskDataError

from ..backbone.loading import decoder
from ..backbone.model import Backbone
from .prefix import Prefix, computed


def read_text(path: Path) -> str:
    """Raises TaskDataError: it cannot be read, is no UTF-8, or is empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskDataError(f"{path}: cannot read the text: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TaskDataError(f"{path}: not text in UTF-8: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise TaskDataError(f"{path}: the text is empty")
    return text


def tokens_of(backbone: Backbone, text: str, role: str | None) -> list[int]:
    """The p tokens that a model reads: of the text alone, or as a turn of the chat template.

    Args:
        role: of the turn; None for the text as it is, with what the tokenizer puts in front of every text.

    Raises:
        TaskDataError: the model's chat template refuses the turn, or the text has more tokens than the model reads.
    """
    if role is not None:
        turn = {"role": role, "content": [{"type": "text", "text": text}]}
        text = backbone.chat_text([turn], generation_prompt=False)
    ids: list[int] = backbone.tokenizer(text, add_special_tokens=role is None)["input_ids"]
    longest = getattr(backbone.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and len(ids) >= longest:
        raise TaskDataError(
            f"the text has {len(ids)} tokens, and the model reads at most {longest}, a request included"
        )
    return ids


def import_text(backbone: Backbone, ids: list[int]) -> Prefix:
    """The prefix of these tokens [p]."""
    return computed(backbone, decoder(backbone.model).get_input_embeddings()(torch.tensor(ids, device=backbone.device)))
