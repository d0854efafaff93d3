"""Which of a task's stored questions a request asks.

    score(q, e) = sum over words t of e of w(t) max over words u of q of cos(h_t, h_u) / sum of w(t)

h are input embeddings, so no forward pass is needed. w(t) = 1 / n(t)^2, where n(t) counts the answers that stored
questions with the word t have: a word that occurs with one answer says which fact is asked for, one that occurs with
many belongs to a wording. So a question finds its fact in a wording that is stored nowhere, as long as it names the
same thing. Where a question is about a picture, the picture names it, and w(t) of the words is next to nothing: they
tell questions about one picture apart.

Shapes: N stored questions, V different words in them, d hidden size, U words of a request.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ..retrieval.entry_terms import FloatArray, IntArray

SHORTLIST: Final = 64  # stored questions that are scored exactly
NEAR: Final = 8  # stored words that a word which is not stored may stand for
LEAST_COSINE: Final = 0.5  # of these
QUESTIONS_AN_ANSWER: Final = 8  # with more, answers are choices, and do not tell one fact from another
CACHED_WORDS: Final = 4096
BESIDE_A_PICTURE: Final = 0.005  # w of all words together, where the picture's is 1
Scores = npt.NDArray[np.float64]


class Vectors(Protocol):
    """The embeddings of words."""

    def __call__(self, words: Sequence[str]) -> FloatArray:
        """[n, d] float32, of norm 1."""
        ...


class QuestionIndex:
    """See the module docstring."""

    def __init__(
        self,
        questions: Sequence[Sequence[str]],
        answers: Sequence[Hashable],
        vectors: Vectors,
        pictures: Container[str] = (),
    ) -> None:
        """
        Args:
            questions: [N], the words of each, none twice; at least one question, and one word in each.
            answers: [N].
            pictures: those of the words that stand for pictures; a question has at most one, the last.
        """
        self.questions, self.vectors = questions, vectors
        numbers = {answer: number for number, answer in enumerate(dict.fromkeys(answers))}
        are_choices = len(numbers) * QUESTIONS_AN_ANSWER < len(answers)
        # [N]: equal for questions that ask for the same fact in different wordings.
        self.facts = np.array(range(len(answers)) if are_choices else [numbers[each] for each in answers])
        vocabulary = list(dict.fromkeys(chain.from_iterable(questions)))
        self._columns = {word: column for column, word in enumerate(vocabulary)}
        self._vectors = vectors(vocabulary)  # [V, d]
        lengths = [len(words) for words in questions]
        self._starts = np.cumsum([0, *lengths])  # [N + 1]
        self._words = np.array([self._columns[word] for word in chain.from_iterable(questions)])  # of all questions
        owners = np.repeat(np.arange(len(questions)), lengths)
        weights = self._frequencies(owners) ** -2.0  # [V]
        self._weights = weights[self._words]
        for start, words in zip(self._starts, questions, strict=False):
            if words[-1] in pictures:
                end = start + len(words) - 1
                self._weights[start:end], self._weights[end] = BESIDE_A_PICTURE / max(1, len(words) - 1), 1.0
        self._totals = np.add.reduceat(self._weights, self._starts[:-1])  # [N]
        self._word_weights = weights
        by_word = np.argsort(self._words, kind="stable")
        self._owners = owners[by_word]
        self._owner_starts = np.searchsorted(self._words[by_word], np.arange(len(vocabulary) + 1))  # [V + 1]
        import faiss  # of an extra: what only reads bundles does without

        self._nearest = faiss.IndexFlatIP(self._vectors.shape[1])
        self._nearest.add(self._vectors)
        self._near = lru_cache(CACHED_WORDS)(self._find_near)

    def __len__(self) -> int:
        return len(self.questions)

    def _frequencies(self, owners: IntArray) -> Scores:
        """n(t), [V]: the facts that each word occurs with."""
        pairs = np.unique(np.stack([self._words, self.facts[owners]]), axis=1)
        return np.bincount(pairs[0]).astype(np.float64)

    def search(self, words: Sequence[str], among: npt.NDArray[np.bool_] | None = None) -> tuple[IntArray, Scores]:
        """The closest stored questions and their scores [n], the best first; of equals, the one stored last.

        Args:
            words: [U] of a request.
            among: [N], the questions that may be found; None for all.
        """
        words = self._as_stored(words)
        found = self._shortlist(words, among)
        if not len(found):
            return found, np.zeros(0)
        lengths = np.diff(self._starts)[found]
        places = np.concatenate([np.arange(self._starts[each], self._starts[each + 1]) for each in found])
        columns, of_place = np.unique(self._words[places], return_inverse=True)
        cosines = self._vectors[columns] @ self.vectors(words).T  # [V', U]
        best = np.minimum(cosines.max(1), 1.0)[of_place]
        scores = np.add.reduceat(self._weights[places] * best, np.cumsum([0, *lengths[:-1]])) / self._totals[found]
        order = np.lexsort((-found, -scores.round(6)))
        return found[order], scores[order]

    def _as_stored(self, words: Sequence[str]) -> list[str]:
        """The words of a request with the hyphens that stored questions give them.

        "x-y" is the name of something else than "x", so it stays one word unless x and y are what is stored.
        """
        spelled = list[str]()
        for word in words:
            parts = word.split("-")
            is_split = word not in self._columns and all(part in self._columns for part in parts)
            spelled += parts if is_split else [word]
        for first, second in pairwise(words):
            if (joined := f"{first}-{second}") in self._columns:
                spelled = [joined, *(word for word in spelled if word not in (first, second))]
        return spelled

    def _shortlist(self, words: Sequence[str], among: npt.NDArray[np.bool_] | None) -> IntArray:
        """The questions that share most with the request, counting for each of its words the stored ones near it."""
        near: dict[int, float] = {}
        for word in words:
            for column, cosine in self._near(word):
                near[column] = max(near.get(column, 0.0), cosine)
        reached = np.zeros(len(self))
        for column, cosine in near.items():
            owners = self._owners[self._owner_starts[column] : self._owner_starts[column + 1]]
            reached[owners] += self._word_weights[column] * cosine
        reached /= self._totals
        if among is not None:
            reached[~among] = 0.0
        best = np.argpartition(-reached, SHORTLIST - 1)[:SHORTLIST] if len(self) > SHORTLIST else np.arange(len(self))
        return best[reached[best] > 0]

    def _find_near(self, word: str) -> tuple[tuple[int, float], ...]:
        """Stored words that a request's word may stand for: itself, or those that are like it; with the cosines."""
        if (column := self._columns.get(word)) is not None:
            return ((column, 1.0),)
        cosines, columns = self._nearest.search(self.vectors([word]), min(NEAR, len(self._columns)))
        pairs = zip(columns[0].tolist(), cosines[0].tolist(), strict=True)
        return tuple((column, cosine) for column, cosine in pairs if cosine >= LEAST_COSINE)
