"""The facts of a bundle for one model: what finds them in its prompts, and their answers in its tokens.

Shapes: N facts, T prompt tokens.
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
from ..facts import FactsFound, QuestionIndex, Vectors, answers_of, words_of
from ..gate import TurnMarks, deciding_tokens
from ..retrieval.entry_terms import IntArray
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

    def question(self, token_ids: Sequence[int]) -> str | None:
        """The text of the question that a prompt [T] asks; None if media are part of it: facts are found by words."""
        deciding = deciding_tokens(token_ids, self.marks, self.placeholders)
        if deciding.media:
            return None
        return str(self.tokenizer.decode([token_ids[at] for at in deciding.text]))

    def answer(self, text: str) -> tuple[int, ...]:
        """As the model must generate it: its text, then the token that ends a turn."""
        return tuple(answer_tokens(self.tokenizer, text))


@dataclass(frozen=True)
class _Task:
    index: QuestionIndex
    numbers: IntArray  # of its questions among the bundle's facts
    threshold: float


class StoredFacts:
    """See the module docstring."""

    def __init__(self, metadata: BundleMetadata, reader: FactReader) -> None:
        self._facts, self._reader = metadata.facts, reader
        self._tasks = {
            task: _Task(*question_index(self._facts, task, reader.vectors), threshold)
            for task, threshold in metadata.fact_thresholds.items()
        }
        self._gate_tasks = frozenset(metadata.gate_tasks)
        self._may_expire = any(fact.expires_at is not None for fact in self._facts)
        self._answer = lru_cache(CACHED_ANSWERS)(lambda number: reader.answer(self._facts[number].answer))

    def find(self, token_ids: Sequence[int], fact_tasks: Collection[str] = ()) -> FactsFound | None:
        """The facts that a prompt [T] asks for: of these tasks, and of those that the bundle's gate does not have.

        Args:
            fact_tasks: what the gate allows.
        """
        question = self._reader.question(token_ids)
        if question is None or not (words := words_of(question)):
            return None
        found = [
            self._find_in(task, words)
            for name, task in self._tasks.items()
            if name in fact_tasks or name not in self._gate_tasks
        ]
        return max((each for each in found if each is not None), key=lambda each: each.answers.weight, default=None)

    def _find_in(self, task: _Task, words: Sequence[str]) -> FactsFound | None:
        questions, scores = task.index.search(words, self._alive(task))
        numbers = task.numbers[questions[: len(scores)]].tolist()
        sure = [number for number, score in zip(numbers, scores, strict=True) if score >= task.threshold]
        answers = answers_of(scores.tolist()[: len(sure)], [self._answer(each) for each in sure], task.threshold)
        if answers is None:
            return None
        return FactsFound(tuple(sure[: len(answers.shares)]), float(scores[0]), answers)

    def _alive(self, task: _Task) -> npt.NDArray[np.bool_] | None:
        if not self._may_expire:
            return None
        now = datetime.now(UTC)
        return np.array([not self._facts[number].has_expired(now) for number in task.numbers])


def question_index(facts: Sequence[FactRecord], task: str, vectors: Vectors) -> tuple[QuestionIndex, IntArray]:
    """Of a task's questions, with their numbers among the facts; of equal questions the one that was stored last."""
    newest = {words_of(fact.question): number for number, fact in enumerate(facts) if fact.task == task}
    in_order = sorted((number, words) for words, number in newest.items())
    numbers = [number for number, _ in in_order]
    index = QuestionIndex([words for _, words in in_order], [facts[number].answer for number in numbers], vectors)
    return index, np.array(numbers)
