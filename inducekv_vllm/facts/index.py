"""The stored questions that a request may ask: the one that it asks word for word, and the nearest others.

Questions are kept as text, and read again when they are compared. Those with a term are kept under it: a request's
rarest terms are looked up first, until enough questions have one.

Shapes: N stored questions.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from heapq import nsmallest
from itertools import islice
from typing import Final, NamedTuple

from ..pace import rest
from .language import Language, language_of
from .question import Key, Question, key_of, needs_context, read
from .rule import SAME, Comparison, compare, compare_names

COMPARED: Final = 16  # stored questions, of those that share most
MOST_COMPARED: Final = 1000  # characters of a request that may ask a question in other words
COUNTED: Final = 1024  # that have one of the request's rarest terms; of a common one, the newest
CACHED_QUESTIONS: Final = 1 << 18
CACHED_READ: Final = 4096


class Found(NamedTuple):
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
        self._same: dict[Language, dict[Key, int]] = {}
        self._earlier: dict[int, int] = {}  # of questions that are equal, by the later one's number
        self._having: dict[Language, dict[str, array[int]]] = {}
        for number, text in enumerate(questions):
            kept = kept_of(text)
            same = self._same.setdefault(kept.language, {})
            if (earlier := same.get(kept.key)) is not None:
                self._earlier[number] = earlier
            same[kept.key] = number
            having = self._having.setdefault(kept.language, defaultdict(lambda: array("I")))
            for term in kept.terms:
                having[term].append(number)
            rest()  # reading one takes a fraction of a millisecond, and Python's lock

    def same_as(self, text: str, among: Callable[[int], bool] = lambda number: True) -> int | None:
        """The last question that this is a wording of, by words alone."""
        latest = (same.get(key_of(text, language)) for language, same in self._same.items())
        found = (self._latest(number, among) for number in latest if number is not None)
        return max((number for number in found if number is not None), default=None)

    def _latest(self, number: int | None, among: Callable[[int], bool]) -> int | None:
        """This one, or the last equal one before it that may be found."""
        while number is not None and not among(number):
            number = self._earlier.get(number)
        return number

    def near(self, text: str, among: Callable[[int], bool] = lambda number: True) -> list[Found]:
        """Stored questions that share words with a request, the nearest first; the one that it asks alone, if any.

        Nothing is near to a text of more than `MOST_COMPARED` characters.
        """
        if (number := self.same_as(text, among)) is not None:
            return [Found(number, SAME)]
        return [] if len(text) > MOST_COMPARED else self._near(text, among, compare)

    def beside(self, text: str, numbers: Sequence[int]) -> list[Found]:
        """These stored questions beside a request."""
        languages = {number: kept_of(self.questions[number]).language for number in numbers}
        asked = {language: read(text, language) for language in set(languages.values())}
        return [
            Found(number, compare(_read(self.questions[number], language), asked[language], language))
            for number, language in languages.items()
        ]

    def named(self, text: str, among: Callable[[int], bool] = lambda number: True) -> Found | None:
        """The question about the same, if it is known that the request asks what the questions ask."""
        if (number := self.same_as(text, among)) is not None:
            return Found(number, SAME)
        compared = partial(compare_names, num_facts=lambda key: self._num_facts[key])
        found = self._near(text, among, lambda stored, asked, _: compared(stored, asked))
        return max(found, key=lambda each: (each.comparison.is_same, each.comparison.closeness), default=None)

    def _near(
        self, text: str, among: Callable[[int], bool], compared: Callable[[Question, Question, Language], Comparison]
    ) -> list[Found]:
        found = list[Found]()
        for language, having in self._having.items():
            asked = read(text, language)
            for number in self._likely(asked, having, among):
                found.append(Found(number, compared(_read(self.questions[number], language), asked, language)))
        found.sort(key=lambda each: (-round(each.comparison.closeness, 6), -each.number))
        return found

    def _likely(self, asked: Question, having: dict[str, array[int]], among: Callable[[int], bool]) -> list[int]:
        """Those that say most of what the request says."""
        rarest = sorted((key for key in asked.terms if key in having), key=lambda key: len(having[key]))
        found = dict.fromkeys(number for key in rarest for number in having[key][: -COUNTED - 1 : -1])
        shares = list[tuple[float, int, int]]()
        for number in islice(filter(among, found), COUNTED):
            terms = kept_of(self.questions[number]).terms
            shares.append((-sum(asked.terms[key].weight for key in terms if key in asked.terms), len(terms), -number))
        return [-number for _, _, number in nsmallest(COMPARED, shares)]

    @cached_property
    def _num_facts(self) -> Counter[str]:
        """The facts whose questions have a term."""
        asked = zip(self.questions, self._facts, strict=True)
        pairs = {(term, fact) for text, fact in asked for term in kept_of(text).terms}
        return Counter(term for term, _ in pairs)


@lru_cache(CACHED_READ)
def _read(text: str, language: Language) -> Question:
    return read(text, language)


class Kept(NamedTuple):
    """What the index needs of a stored question."""

    language: Language
    key: Key
    terms: tuple[str, ...]  # their keys
    needs_context: bool


@lru_cache(CACHED_QUESTIONS)  # the next version of a bundle has most of the questions of this one
def kept_of(text: str) -> Kept:
    """Of a question in the language that it is written in."""
    language = language_of(text)
    question = read(text, language)
    return Kept(language, question.key, tuple(question.terms), needs_context(question, text, language))


def key_of_stored(text: str) -> Key:
    """What makes two stored questions one."""
    return kept_of(text).key
