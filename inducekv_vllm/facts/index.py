"""Which of a task's stored questions a request asks, by the rule of `rule.py`.

A stored question is kept under the rarest of its terms that have more than half of its weight together: a request that
says less than half of the weight does not ask it, so one that does shares a key with it (prefix filtering, Chaudhuri,
Ganti and Kaushik, 2006). What a question says is read again when it is compared: questions are kept as text.

Shapes: N stored questions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import islice
from typing import Final, NamedTuple

from rapidfuzz.distance import OSA
from rapidfuzz.process import extract_iter

from ..pace import rest
from .language import Language, language_of
from .question import Question, read, same_words
from .rule import SAME, Comparison, compare, compare_names

CANDIDATES: Final = 16  # stored questions that are compared
RANKED: Final = 512  # of those that share most
NEAREST: Final = 4  # of those that no request can ask for
LOOKED_AT: Final = 256  # of those that have a term, for the nearest
COUNTED: Final = 4096  # of those that have a key
CACHED_QUESTIONS: Final = 1 << 18
CACHED_WORDS: Final = 4096
SPELLED: Final = 5  # letters of a word that may have a typing error
Key = str | tuple[str, int]
KeysOfTerm = tuple[set[Key], float]  # with its weight


@dataclass(frozen=True, slots=True)
class Found:
    """A stored question beside a request."""

    number: int
    comparison: Comparison


class QuestionIndex:
    """See the module docstring."""

    def __init__(self, questions: Sequence[str], facts: Sequence[int] | None = None) -> None:
        """
        Args:
            questions: [N]; of equal ones the last is found.
            facts: [N], equal for wordings of one question (default: each is of its own).
        """
        self.questions = questions
        self._facts = facts or range(len(questions))
        self._same: dict[tuple[str, ...], int] = {}
        self._under: dict[Language, dict[Key, list[int]]] = {}
        self._words = set[str]()
        for number, text in enumerate(questions):
            kept = _kept(text)
            self._same[kept.words] = number
            self._words.update(kept.words)
            under = self._under.setdefault(kept.language, defaultdict(list))
            for key in kept.keys:
                under[key].append(number)
            rest()  # reading one takes a fraction of a millisecond, and Python's lock
        self._spelled = _by_length(sorted(self._words))  # of equally near ones, always the same
        self._near = lru_cache(CACHED_WORDS)(self._find_near)

    def __len__(self) -> int:
        return len(self.questions)

    def same_as(self, text: str) -> int | None:
        """The last question with the same words."""
        return self._same.get(same_words(text))

    def find(
        self,
        text: str,
        among: Callable[[int], bool] = lambda number: True,
        *,
        names_suffice: bool = False,
    ) -> Found | None:
        """The question that a request asks, or else the nearest one with what it lacks; None if none is near.

        Args:
            among: whether a question may be found.
            names_suffice: it is known that the request asks what the questions ask, and to be found out of what.
        """
        number = self.same_as(text)
        if number is not None and among(number):
            return Found(number, SAME)
        compared = partial(compare_names, num_facts=lambda key: self._num_facts[key]) if names_suffice else compare
        best: Found | None = None
        for language in self._under:
            for found in self._compared(read(text, language), language, among, compared):
                if best is None or _rank(found) > _rank(best):
                    best = found
                if best.comparison.is_asked and best.comparison.closeness == 1.0:
                    return best  # the newest of those that share most
        return best

    def _compared(
        self, asked: Question, language: Language, among: Callable[[int], bool], compared: Callable[..., Comparison]
    ) -> Iterable[Found]:
        replaced = {
            term.word: near for term in asked.terms.values() if (near := self._near(term.word, language)) is not None
        }
        keys_of = _keys_of(asked, language, replaced)
        counts = self._counted(keys_of, self._under[language])
        likely = _highest(counts, among, RANKED)
        keys = frozenset[Key]().union(*(keys for keys, _ in keys_of))
        # Of those that share as much, first the ones that have least beside it: Kyoto before Kyoto Station.
        likely.sort(key=lambda number: (-counts[number], len(_kept(self.questions[number]).keys - keys), -number))
        candidates = likely[:CANDIDATES]
        if not candidates:  # none is asked; the nearest says what it lacks
            terms: list[KeysOfTerm] = [({term.key}, term.weight) for term in asked.terms.values()]
            candidates = _highest(self._counted(terms, self._by_term[language], LOOKED_AT), among, NEAREST)
        for number in candidates:
            yield Found(number, compared(_read(self.questions[number], language), asked, language, replaced))

    def _counted(
        self, keys_of: Iterable[KeysOfTerm], under: Mapping[Key, list[int]], most: int = COUNTED
    ) -> dict[int, float]:
        """Questions that have a key of some of these terms, with the terms' weight; of common keys, the newest."""
        counts = defaultdict[int, float](float)
        for keys, weight in keys_of:
            for number in {number for key in keys if key in under for number in under[key][-most:]}:
                counts[number] += weight
        return counts

    @cached_property
    def _by_term(self) -> dict[Language, dict[Key, list[int]]]:
        """All questions that have a term, which they need not be kept under."""
        found: dict[Language, dict[Key, list[int]]] = {language: defaultdict(list) for language in self._under}
        for number, text in enumerate(self.questions):
            kept = _kept(text)
            for term in kept.terms:
                found[kept.language][term].append(number)
        return found

    @cached_property
    def _num_facts(self) -> Counter[str]:
        """The facts whose questions have a term."""
        asked = zip(self.questions, self._facts, strict=True)
        pairs = {(term, fact) for text, fact in asked for term in _kept(text).terms}
        return Counter(term for term, _ in pairs)

    def _find_near(self, word: str, language: Language) -> str | None:
        """The stored word that a word with a typing error stands for; None if it is a word itself, or fits several."""
        is_word = word in self._words or language.is_common(language.stem(word))
        if is_word or len(word) < SPELLED or not word.isalpha():
            return None
        found: dict[str, str] = {}  # by their stems
        for more in (0, -1, 1):
            words = self._spelled.get((word[0], len(word) + more), ())
            for near, _, _ in extract_iter(word, words, scorer=OSA.distance, score_cutoff=1):
                found.setdefault(language.stem(near), near)
        return next(iter(found.values())) if len(found) == 1 else None


def _highest(counts: Mapping[int, float], among: Callable[[int], bool], most: int) -> list[int]:
    in_order = sorted(counts, key=lambda number: (-counts[number], -number))
    return list(islice(filter(among, in_order), most))


def _rank(found: Found) -> tuple[bool, float, int]:
    return found.comparison.is_asked, round(found.comparison.closeness, 6), found.number


@lru_cache(CACHED_WORDS)
def _read(text: str, language: Language) -> Question:
    return read(text, language)


class _Kept(NamedTuple):
    words: tuple[str, ...]
    language: Language
    keys: frozenset[Key]  # what the question is kept under
    terms: tuple[str, ...]  # the keys of its terms


@lru_cache(CACHED_QUESTIONS)  # the next version of a bundle has most of the questions of this one
def _kept(text: str) -> _Kept:
    """What the index needs of a stored question."""
    language = language_of(text)
    question = read(text, language)
    terms = sorted(
        question.terms.values(), key=lambda term: (term.is_function, -term.is_name, -term.is_exact, -term.weight)
    )
    total, keys = sum(term.weight for term in terms), list[Key]()
    for term in terms:
        if terms[0].is_name and not (term.is_name or term.is_exact):
            break  # all of its names, numbers and symbols must be said
        keys += [term.word, term.stem]
        if term.is_name:
            continue
        if not term.is_exact:
            keys += [("sense", sense) for sense in term.senses]
        if not term.is_function and (total := total - term.weight) < sum(each.weight for each in terms) / 2:
            break  # what a request must say of the others; a function word is never missing
    return _Kept(question.words, language, frozenset(keys), tuple(question.terms))


def _keys_of(asked: Question, language: Language, replaced: dict[str, str]) -> list[KeysOfTerm]:
    """What a request's questions may be kept under, term by term."""
    found = list[KeysOfTerm]()
    for term in asked.terms.values():
        near = replaced.get(term.word, term.word)
        keys: set[Key] = {term.word, term.stem, near, language.stem(near)}
        keys.update(("sense", sense) for sense in term.senses)
        if not term.is_name:
            keys |= language.related(term.stem)
        found.append((keys, term.weight))
    return found


def _by_length(words: Iterable[str]) -> dict[tuple[str, int], list[str]]:
    """By first letter and length."""
    found = defaultdict[tuple[str, int], list[str]](list)
    for word in words:
        if len(word) >= SPELLED - 1 and word.isalpha():
            found[word[0], len(word)].append(word)
    return found
