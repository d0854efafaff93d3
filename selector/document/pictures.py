"""The pictures that a Markdown document names, for a model that takes pictures: read where they stand in the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from PIL import Image
from torch import Tensor

from inducekv_vllm.errors import TaskDataError, UnsupportedModel

from ..backbone.generation import generate
from ..backbone.loading import decoder
from ..backbone.model import TOKEN_INPUTS, Backbone, Inputs
from ..data.document import Document
from ..data.examples import is_url, picture_beneath
from .references import Turn, count_of

MARK: Final = "\ufffc"  # stands for a picture in a text that is cut into blocks: Unicode's object replacement character
NAMED: Final = re.compile(r"!\[([^\]]*)\]\(\s*<?([^\s()<>]+)>?(?:\s+\"[^\"\n]*\")?\s*\)")
DESCRIBE: Final = "Describe this picture."
DESCRIBED: Final = 64  # tokens of what the model says of a picture, at most


@dataclass(frozen=True)
class Picture:
    """A picture, and what the document calls it."""

    caption: str
    image: Image.Image


@dataclass(frozen=True)
class Illustrated:
    """A document's text, with a `MARK` where each of its pictures stands, in front of its caption."""

    backbone: Backbone
    text: str
    pictures: tuple[Picture, ...] = ()

    @classmethod
    def of(cls, backbone: Backbone, document: Document) -> Illustrated:
        """Without pictures, if the model takes none or the document names none: they stay as Markdown has them.

        Raises:
            TaskDataError: a picture is not there, lies outside the document's folder or cannot be used, or the text
                holds what stands for a picture in the model's prompts.
        """
        backbone.refuse_marks([document.text])
        if backbone.kind == "text" or document.folder is None:
            return cls(backbone, document.text)
        folder, place, found = document.folder, f"the document {document.name!r}", list[Picture]()

        def marked(named: re.Match[str]) -> str:
            caption, reference = named.groups()
            if is_url(reference):  # nothing is downloaded
                return named[0]
            found.append(Picture(caption, picture_beneath(reference, folder, place)))
            return f"{MARK}{caption}"

        return cls(backbone, NAMED.sub(marked, document.text.replace(MARK, " ")), tuple(found))

    @cached_property
    def size(self) -> int:
        """Tokens of the largest picture. Raises TaskDataError: the model has no place for pictures, or refuses one."""
        return max((self.encoded(MARK, [each], False)["input_ids"].shape[1] for each in self.pictures), default=0)

    @cached_property
    def _written(self) -> str:
        """How the chat template writes a picture. Raises TaskDataError: it writes none."""
        text = {"type": "text", "text": "P"}
        with_it, without = (
            self.backbone.chat_text([{"role": "user", "content": content}], generation_prompt=False)
            for content in ([{"type": "image"}, text], [text])
        )
        pairs = enumerate(zip(with_it, without, strict=False))
        if (begin := next((place for place, pair in pairs if len(set(pair)) > 1), None)) is None:
            raise TaskDataError(
                "the model's chat template takes text alone, so it has no place for a document's pictures"
            )
        return with_it[begin : begin + len(with_it) - len(without)]

    def count(self, text: str) -> int:
        """How many tokens a part of the text has, about."""
        return count_of(self.backbone, text) + text.count(MARK) * self.size

    def encoded(self, text: str, pictures: Sequence[Picture], first: bool) -> Inputs:
        """What the model is given for a part of the text, whose pictures are these.

        Args:
            first: with what the tokenizer puts in front of every text.
        """
        if not pictures:
            return {
                "input_ids": self.backbone.tokenizer(text, add_special_tokens=first, return_tensors="pt")["input_ids"]
            }
        written = text.replace(MARK, self._written)
        return self.backbone.encode_text(written, [each.image for each in pictures], add_special_tokens=first)


def described(backbone: Backbone, pictures: Sequence[Picture]) -> list[Turn]:
    """What the model says of each when it sees it."""
    if not pictures:
        return []
    shown = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": DESCRIBE}]}
    prompts = [backbone.encode([shown], [each.image]) for each in pictures]
    said = [generate(backbone, [prompt], DESCRIBED)[0].token_ids for prompt in prompts]
    texts = backbone.tokenizer.batch_decode(said, skip_special_tokens=True)
    return [
        Turn(_asked(each.caption), text.strip()) for each, text in zip(pictures, texts, strict=True) if text.strip()
    ]


def without_marks(text: str) -> str:
    return text.replace(MARK, "")


@torch.no_grad()
def embedded(backbone: Backbone, parts: Sequence[Inputs]) -> tuple[Tensor, Tensor]:
    """What the language model is given for parts with pictures, read behind one another.

    Returns:
        Embeddings [1, N, d], and their positions [1, N] or [axes, 1, N] int64, of which the last is -1.

    Raises:
        UnsupportedModel: it is given something of the pictures in later layers, too.
    """
    parts = [{name: each.to(backbone.device) for name, each in part.items()} for part in parts]
    ids = torch.cat([part["input_ids"] for part in parts], dim=1)
    inputs: Inputs = {name: each for name, each in backbone.collate(parts).items() if name not in TOKEN_INPUTS}
    if any("mm_token_type_ids" in part for part in parts):
        kinds = [part.get("mm_token_type_ids", torch.zeros_like(part["input_ids"])) for part in parts]
        inputs["mm_token_type_ids"] = torch.cat(kinds, dim=1)
    given: dict[str, Tensor] = {}

    def stop(module: torch.nn.Module, arguments: object, options: dict[str, Tensor]) -> None:
        given.update({name: each for name, each in options.items() if each is not None})
        raise _Given

    handle = decoder(backbone.model).register_forward_pre_hook(stop, with_kwargs=True)
    try:
        backbone.model(input_ids=ids, **inputs, use_cache=False)
    except _Given:
        pass
    finally:
        handle.remove()
    if deep := sorted(name for name in given if "deepstack" in name):
        raise UnsupportedModel(
            f"a document's pictures must be tokens alone, and this model also gives layers {deep[0]!r}"
        )
    embeddings = given["inputs_embeds"]
    positions = given.get("position_ids", torch.arange(embeddings.shape[1])[None])
    return embeddings, positions - positions.max() - 1


class _Given(Exception):
    """The decoder's arguments are known."""


def _asked(caption: str) -> str:
    return (
        f'What does the picture "{caption}" of the text show?' if caption else "What does the picture of the text show?"
    )
