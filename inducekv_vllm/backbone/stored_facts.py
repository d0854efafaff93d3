"""The facts of a bundle for one model: what finds them in its prompts, and their answers in its tokens.

Shapes: T prompt tokens, F = J D features of a picture's state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..bundle import BackboneFingerprint, BundleMetadata, FactRecord
from ..facts import SAME, Comparison, FactFound, FactMissed, PictureIndex, QuestionIndex
from ..gate import TurnMarks, deciding_tokens
from ..retrieval.entry_terms import FloatArray
from .checkpoints import load_config, load_tokenizer
from .fingerprint import fingerprint_of
from .placeholders import placeholder_ids
from .turns import answer_mark, answer_tokens, special_ids, turn_marks
from .weights import weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CACHED_ANSWERS: Final = 4096
NEAR: Final = 0.3  # of a question's weight, that a request says of the nearest one


@dataclass(frozen=True)
class AskedQuestion:
    """What a prompt asks."""

    text: str
    has_media: bool
    begun: str  # the answer, as far as the request has begun it itself


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

    def question(self, token_ids: Sequence[int]) -> AskedQuestion:
        """What a prompt [T] asks."""
        deciding = deciding_tokens(token_ids, self.marks, self.placeholders)
        behind = tuple(token_ids[deciding.text[-1] + 1 :]) if deciding.text else ()
        begun = behind[len(self.answer_mark) :] if behind[: len(self.answer_mark)] == self.answer_mark else ()
        if self.marks.end in begun:  # an earlier answer, which the model is asked for again
            begun = ()
        return AskedQuestion(
            self._text([token_ids[at] for at in deciding.text]), bool(deciding.media), self._text(begun)
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


class StoredFacts:
    """See the module docstring."""

    def __init__(self, metadata: BundleMetadata, reader: FactReader) -> None:
        self._facts, self.reader = metadata.facts, reader
        self._gate_tasks = frozenset(metadata.gate_tasks)
        self._tasks = {task: _Task(metadata.facts, task) for task in metadata.fact_tasks}
        self._answer = lru_cache(CACHED_ANSWERS)(lambda number: reader.answer(self._facts[number].answer))

    def find(
        self, asked: AskedQuestion, fact_tasks: Collection[str] = (), picture: FloatArray | None = None
    ) -> FactFound | FactMissed | None:
        """The fact that a prompt asks for, or the nearest: of these tasks, or of those that the gate does not have.

        Args:
            fact_tasks: what the gate allows. It has told what is asked there, and the words tell of what.
            picture: [F], the state of the prompt's media (`inducekv_vllm.facts.pictures`). With one, facts with a
                picture are found, and without, the others.
        """
        if asked.has_media and picture is None:
            return None
        now = datetime.now(UTC)

        def is_served(number: int) -> bool:
            return not self._facts[number].has_expired(now)

        allowed = [name for name in self._tasks if name in fact_tasks or name not in self._gate_tasks]
        found = [
            each
            for name in allowed
            for each in self._tasks[name].find(asked.text, picture, is_served, names_suffice=name in fact_tasks)
        ]
        if not found:
            return None
        number, near = max(found, key=lambda each: (each[1].is_asked, each[1].closeness))
        if near.differs is not None:
            if near.said < NEAR:
                return None
            return FactMissed(number, near.differs, near.missing, near.added)
        return self._found(number, near.closeness, asked.begun)

    def _found(self, number: int, closeness: float, begun: str) -> FactFound:
        if not begun.strip():
            return FactFound(number, closeness, self._answer(number))
        answer = self._facts[number].answer
        if not answer.startswith(begun := begun.strip()):
            return FactFound(number, closeness, withheld="the request begins the answer in another way")
        return FactFound(number, closeness, self.reader.answer(answer[len(begun) :]))


class _Task:
    """The facts of one task, with the numbers that the bundle gives them."""

    def __init__(self, facts: Sequence[FactRecord], task: str) -> None:
        about = defaultdict[str | None, list[tuple[str, int]]](list)  # questions by their picture, if they have one
        for number, fact in enumerate(facts):
            if fact.task == task:
                about[fact.picture] += [(question, number) for question in (*fact.also, fact.question)]
        self._about = {picture: _Questions(asked) for picture, asked in about.items()}
        self._superseded = {
            number
            for number, fact in enumerate(facts)
            if fact.task == task and fact.also and self._about[fact.picture].last(fact.question) != number
        }
        pictures = [picture for picture in about if picture is not None]
        self._pictures = PictureIndex(pictures) if pictures else None

    def find(
        self, text: str, picture: FloatArray | None, is_served: Callable[[int], bool], *, names_suffice: bool
    ) -> list[tuple[int, Comparison]]:
        """The number of the nearest fact, beside the request; nothing if none is near."""

        def counts(number: int) -> bool:
            return number not in self._superseded and is_served(number)

        if picture is None:
            questions = self._about.get(None)
            if questions is None:
                return []
            found = questions.find(text, counts, names_suffice=names_suffice)
            return [] if found is None else [found]
        shown = None if self._pictures is None else self._pictures.find(picture)
        number = None if shown is None else self._about[shown[0]].nearest(text, counts)
        return [] if shown is None or number is None else [(number, replace(SAME, said=shown[1]))]


class _Questions:
    def __init__(self, asked: Sequence[tuple[str, int]]) -> None:
        """`asked`: questions with the numbers of their facts; of equal ones the last counts."""
        self._numbers = [number for _, number in asked]
        self._index = QuestionIndex([question for question, _ in asked], self._numbers)

    def last(self, question: str) -> int | None:
        """The last fact with this question."""
        found = self._index.same_as(question)
        return None if found is None else self._numbers[found]

    def find(
        self, text: str, is_served: Callable[[int], bool], *, names_suffice: bool
    ) -> tuple[int, Comparison] | None:
        found = self._index.find(text, lambda place: is_served(self._numbers[place]), names_suffice=names_suffice)
        return None if found is None else (self._numbers[found.number], found.comparison)

    def nearest(self, text: str, is_served: Callable[[int], bool]) -> int | None:
        """Of questions about one picture, which decides: the one that is asked, or nearest, or stored last."""
        if (found := self.find(text, is_served, names_suffice=False)) is not None:
            return found[0]
        return next((number for number in reversed(self._numbers) if is_served(number)), None)
