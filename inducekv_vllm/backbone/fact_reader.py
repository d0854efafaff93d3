"""How a model's prompts are read for facts, and stored answers written in its tokens.

Shapes: T prompt tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..bundle import BackboneFingerprint
from ..files.picture import joined
from ..gate import TurnMarks, deciding_tokens
from .checkpoints import load_config, load_tokenizer
from .fingerprint import fingerprint_of
from .placeholders import placeholder_ids
from .turns import answer_mark, answer_tokens, special_ids, turn_marks
from .weights import weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class ShownPicture:
    """A picture in a prompt."""

    places: range  # of its tokens
    digest: str  # of its pixels, see `inducekv_vllm.files.picture`


@dataclass(frozen=True)
class AskedQuestion:
    """What a prompt asks."""

    text: str
    has_media: bool
    begun: str  # the answer, as far as the request has begun it itself
    picture: str | None = None  # the digest of the media that it is about; None: there is none, or it is not known


@dataclass(frozen=True)
class FactReader:
    """How a model's prompts are read, and its answers written."""

    tokenizer: PreTrainedTokenizerBase
    marks: TurnMarks
    answer_mark: tuple[int, ...]  # between a question and its answer
    placeholders: Collection[int]  # the ids of tokens that stand for media
    model: BackboneFingerprint
    context: int | None  # tokens that the model takes; None: not known

    @classmethod
    def of(
        cls,
        model: str | Path,
        revision: str | None = None,
        cache: str | None = None,
        *,
        fingerprint: BackboneFingerprint | None = None,
        context: int | None = None,
    ) -> FactReader:
        """Of a checkpoint. No model is loaded.

        Args:
            cache: where a model of the hub was fetched to (default: the hub's own cache).
            fingerprint: the model's, if it is known already.
            context: tokens that the model is served with (default: those that it takes).

        Raises:
            UnsupportedModel: it has no tokenizer.
        """
        config, _ = load_config(model, revision)
        tokenizer = load_tokenizer(model, revision)
        if fingerprint is None:
            fingerprint = fingerprint_of(config, tokenizer, weights_digest(model, revision, cache))
        return cls.made(config, tokenizer, fingerprint, context)

    @classmethod
    def of_engine(cls, config: VllmConfig, fingerprint: BackboneFingerprint) -> FactReader:
        """Of the model that an engine serves. Raises UnsupportedModel: as for `of`."""
        model, cache = config.model_config, config.load_config.download_dir
        return cls.of(model.model, model.revision, cache, fingerprint=fingerprint, context=model.max_model_len)

    @classmethod
    def made(
        cls, config: PretrainedConfig, processor: Any, fingerprint: BackboneFingerprint, context: int | None = None
    ) -> FactReader:
        """From a model's configuration and its processor, or its tokenizer; `context` as for `of`."""
        context = context or getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        tokenizer = getattr(processor, "tokenizer", processor)
        return cls(
            tokenizer, turn_marks(processor), answer_mark(processor), placeholder_ids(config), fingerprint, context
        )

    def question(self, token_ids: Sequence[int], pictures: Sequence[ShownPicture] = ()) -> AskedQuestion:
        """What a prompt [T] asks, of whose media these are known."""
        deciding = deciding_tokens(token_ids, self.marks, self.placeholders)
        behind = tuple(token_ids[deciding.text[-1] + 1 :]) if deciding.text else ()
        begun = behind[len(self.answer_mark) :] if behind[: len(self.answer_mark)] == self.answer_mark else ()
        if self.marks.end in begun:  # an earlier answer, which the model is asked for again
            begun = ()
        shown = [each for each in pictures if not set(each.places).isdisjoint(deciding.media)]
        is_known = bool(shown) and set().union(*(each.places for each in shown)).issuperset(deciding.media)
        return AskedQuestion(
            text=self._text([token_ids[at] for at in deciding.text]),
            has_media=bool(deciding.media),
            begun=self._text(begun),
            picture=joined([each.digest for each in shown]) if is_known else None,
        )

    def answer(self, text: str) -> tuple[int, ...]:
        """As the model must generate it: its text, then the token that ends a turn."""
        return tuple(answer_tokens(self.tokenizer, text))

    def mark_in(self, text: str) -> str | None:
        """A token of the chat template that a text has, which would end a turn or begin one; None if it has none."""
        token_ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        found = next((token for token in token_ids if token in self._special_ids), None)
        return None if found is None else str(self.tokenizer.convert_ids_to_tokens(found))

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return special_ids(self.tokenizer)

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))
