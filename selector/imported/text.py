"""A text as memory: the keys and values of its own tokens, as in front of a request."""

from pathlib import Path

from inducekv_vllm.errors import TaskDataError

from ..backbone.loading import decoder
from ..backbone.model import Backbone
from ..data.encoding import read_text
from .prefix import Prefix, computed
from .source import Source, sha256_of


def text_source(path: Path, role: str | None) -> Source:
    """A text as it is, or as a turn of the chat template.

    Args:
        role: of the turn; None for the text alone, with what the tokenizer puts in front of every text.

    Raises:
        TaskDataError: it cannot be read, is no UTF-8, or is empty.
    """
    text = read_text(path, "the text")
    if not text.strip():
        raise TaskDataError(f"{path}: the text is empty")
    return Source(sha256_of(path), {"source": "text", "role": role}, lambda backbone: _prefix(backbone, text, role))


def _prefix(backbone: Backbone, text: str, role: str | None) -> Prefix:
    """Raises TaskDataError: the chat template refuses the turn, or the text is longer than the model reads."""
    if role is not None:
        turn = {"role": role, "content": [{"type": "text", "text": text}]}
        text = backbone.chat_text([turn], generation_prompt=False)
    ids = backbone.tokenizer(text, add_special_tokens=role is None, return_tensors="pt")["input_ids"][0]  # [p]
    longest = getattr(backbone.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if longest is not None and len(ids) >= longest:
        raise TaskDataError(f"the text has {len(ids)} tokens, and the model reads {longest}, a request included")
    return computed(backbone, decoder(backbone.model).get_input_embeddings()(ids.to(backbone.device)))
