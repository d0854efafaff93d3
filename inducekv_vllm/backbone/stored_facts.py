"""The facts of a bundle for one model: what finds them in its prompts, and their answers in its tokens.

Shapes: N facts, T prompt tokens, F = J D features of a picture's state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from ..bundle import BackboneFingerprint, BundleMetadata, FactRecord
from ..facts import FactsFound, PictureVectors, QuestionIndex, Vectors, answers_of, asked_words, packed
from ..gate import TurnMarks, deciding_tokens
from ..retrieval.entry_terms import FloatArray, IntArray
from .checkpoints import load_config, load_tokenizer
from .fingerprint import fingerprint_of
from .placeholders import placeholder_ids
from .turns import answer_tokens, turn_marks
from .weights import weights_digest
from .word_vectors import WordVectors

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CACHED_ANSWERS: Final = 4096


@dataclass(frozen=True)
class FactReader:
    """How a model's prompts are read, and its answers written."""

    tokenizer: PreTrainedTokenizerBase
    vectors: Vectors
    marks: TurnMarks
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
            UnsupportedModel: it has no tokenizer, or no input embeddings in a safetensors file.
        """
        config, _ = load_config(model, revision)
        tokenizer = load_tokenizer(model, revision)
        vectors = WordVectors.of(tokenizer, model, revision, cache)
        if fingerprint is None:
            fingerprint = fingerprint_of(config, tokenizer, weights_digest(model, revision, cache))
        return cls.made(config, tokenizer, vectors, fingerprint, context)

    @classmethod
    def of_engine(cls, config: VllmConfig, fingerprint: BackboneFingerprint) -> FactReader:
        """Of the model that an engine serves. Raises UnsupportedModel: as for `of`."""
        model, cache = config.model_config, config.load_config.download_dir
        return cls.of(model.model, model.revision, cache, fingerprint=fingerprint, context=model.max_model_len)

    @classmethod
    def made(
        cls,
        config: PretrainedConfig,
        processor: Any,
        vectors: Vectors,
        fingerprint: BackboneFingerprint,
        context: int | None = None,
    ) -> FactReader:
        """From a model's configuration and its processor, or its tokenizer; `context` as for `of`."""
        context = context or getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        tokenizer = getattr(processor, "tokenizer", processor)
        return cls(tokenizer, vectors, turn_marks(processor), placeholder_ids(config), fingerprint, context)

    def question(self, token_ids: Sequence[int], picture: FloatArray | None = None) -> tuple[str, ...] | None:
        """The words of the question that a prompt [T] asks; None if it has media whose state is not known.

        Args:
            picture: [F], the state of its media (`inducekv_vllm.facts.pictures`).
        """
        deciding = deciding_tokens(token_ids, self.marks, self.placeholders)
        if deciding.media and picture is None:
            return None
        text = str(self.tokenizer.decode([token_ids[at] for at in deciding.text], skip_special_tokens=True))
        return asked_words(text, None if picture is None else packed(picture))

    def answer(self, text: str) -> tuple[int, ...]:
        """As the model must generate it: its text, then the token that ends a turn."""
        return tuple(answer_tokens(self.tokenizer, text))


@dataclass(frozen=True)
class _Task:
    index: QuestionIndex
    numbers: IntArray  # of its questions among the bundle's facts
    threshold: float
    pictured: npt.NDArray[np.bool_]  # which of the questions have a picture


class StoredFacts:
    """See the module docstring."""

    def __init__(self, metadata: BundleMetadata, reader: FactReader) -> None:
        self._facts, self._reader = metadata.facts, reader
        self._tasks = {task: self._index(task, threshold) for task, threshold in metadata.fact_thresholds.items()}
        self._gate_tasks = frozenset(metadata.gate_tasks)
        self._may_expire = any(fact.expires_at is not None for fact in self._facts)
        self._answer = lru_cache(CACHED_ANSWERS)(lambda number: reader.answer(self._facts[number].answer))

    def _index(self, task: str, threshold: float) -> _Task:
        index, numbers = question_index(self._facts, task, self._reader.vectors)
        pictured = np.array([self._facts[number].picture is not None for number in numbers])
        return _Task(index, numbers, threshold, pictured)

    def find(
        self, token_ids: Sequence[int], fact_tasks: Collection[str] = (), picture: FloatArray | None = None
    ) -> FactsFound | None:
        """The facts that a prompt [T] asks for: of these tasks, and of those that the bundle's gate does not have.

        With a picture, those that have one, and without, the others.

        Args:
            fact_tasks: what the gate allows.
            picture: as for `FactReader.question`.
        """
        if not (words := self._reader.question(token_ids, picture)):
            return None
        found = [
            self._find_in(task, words, pictured=picture is not None)
            for name, task in self._tasks.items()
            if name in fact_tasks or name not in self._gate_tasks
        ]
        return max((each for each in found if each is not None), key=lambda each: each.answers.weight, default=None)

    def _find_in(self, task: _Task, words: Sequence[str], *, pictured: bool) -> FactsFound | None:
        questions, scores = task.index.search(words, self._among(task, pictured=pictured))
        numbers, seen = task.numbers[questions[: len(scores)]].tolist(), set[str | int]()
        sure: dict[int, float] = {}  # score by number, the best first; of each picture one question
        for number, score in zip(numbers, scores.tolist(), strict=True):
            identity = self._facts[number].picture or number
            if score >= task.threshold and identity not in seen:
                sure[number] = score
                seen.add(identity)
        answers = answers_of(list(sure.values()), [self._answer(each) for each in sure], task.threshold)
        if answers is None:
            return None
        return FactsFound(tuple(sure)[: len(answers.shares)], float(scores[0]), answers)

    def _among(self, task: _Task, *, pictured: bool) -> npt.NDArray[np.bool_]:
        """The questions with a picture, or without, that have not expired."""
        among = task.pictured if pictured else ~task.pictured
        if not self._may_expire:
            return among
        now = datetime.now(UTC)
        return among & [not self._facts[number].has_expired(now) for number in task.numbers]


def question_index(facts: Sequence[FactRecord], task: str, vectors: Vectors) -> tuple[QuestionIndex, IntArray]:
    """Of a task's questions, with their numbers among the facts; of equal questions the one that was stored last."""
    of_task = {number: fact for number, fact in enumerate(facts) if fact.task == task}
    newest = {asked_words(fact.question, fact.picture): number for number, fact in of_task.items()}
    in_order = sorted((number, words) for words, number in newest.items())
    numbers = [number for number, _ in in_order]
    questions, pictures = [words for _, words in in_order], {}
    for number, words in in_order:
        if (picture := facts[number].picture) is not None:
            pictures[words[-1]] = picture
    if pictures:
        vectors = PictureVectors(vectors, list(pictures.values()))
    # Questions about one picture are found by it alike, so they are one fact.
    identities = [facts[number].picture or facts[number].answer for number in numbers]
    return QuestionIndex(questions, identities, vectors, pictures), np.array(numbers)
