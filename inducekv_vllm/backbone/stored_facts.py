"""The facts of a bundle for one model: which of them a request's text asks for, and what is said then.

StoredQuestions  its text and pictures: in the process that asks the judge, before the engine has the request
StoredAnswers    with what the gate tells: where the request is decided
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Final

from ..bundle import BundleMetadata, FactRecord
from ..facts import AskedFact, AskedFacts, FactFound, FactMissed, Found, QuestionIndex
from ..facts.index import kept_of, key_of_stored
from ..judge import Pair, can_be_asked
from .fact_reader import AskedQuestion, FactReader

CACHED_ANSWERS: Final = 4096
CACHED_PICTURES: Final = 1024  # whose questions are at hand
MOST_JUDGED: Final = 3  # stored questions beside one request
NEAR: Final = 0.34  # of a question's weight, that a request says of one that is judged, or named as missed
CLOSE: Final = 0.2  # what both say, of what either says, of one that is judged; of others a judge says too often yes
NOT_JUDGED: Final = "nobody judges whether it asks the same in other words"
NO_ANSWER: Final = "the judge has given no answer"
REFUSED: Final = "the judge says that it asks something else"
NOT_JUDGEABLE: Final = "it is too long to be judged, or has the judge's own words"
OTHER_PICTURE: Final = "it shows other pictures"
OTHER_WORDS: Final = "it says something else, or the same in other words"


@dataclass(frozen=True)
class Candidates:
    """What words tell of a request, and what is to be judged."""

    by_words: tuple[AskedFact, ...]
    near: Mapping[int, Found] = field(default_factory=dict)  # by the fact's number, what nothing refuses
    pairs: Mapping[int, Pair] = field(default_factory=dict)  # of these, with the wording that is nearest
    missed: FactMissed | None = None

    @property
    def to_judge(self) -> tuple[Pair, ...]:
        """Nothing if words have found a fact."""
        return () if self.by_words else tuple(self.pairs.values())

    def settled(self, odds: Mapping[Pair, float] | None, threshold: float, no_odds: str = NOT_JUDGED) -> AskedFacts:
        """With the judge's answers; None: there is no judge, or `no_odds` says why there are none."""
        known = [(number, (odds or {}).get(pair)) for number, pair in self.pairs.items()]
        judged = sorted(((each, number) for number, each in known if each is not None), reverse=True)
        found = tuple(
            AskedFact(number, self.near[number].comparison.closeness, each)
            for each, number in judged
            if each >= threshold
        )
        if self.by_words or found:
            return AskedFacts((*self.by_words, *found))
        if not self.pairs:
            return AskedFacts(missed=self.missed)
        each, number = judged[0] if judged else (None, next(iter(self.pairs)))
        comparison = self.near[number].comparison
        why = REFUSED if each is not None else no_odds
        return AskedFacts(missed=FactMissed(number, why, comparison.missing, comparison.added, each))


class StoredQuestions:
    """See the module docstring. Any thread may use it."""

    def __init__(self, facts: Sequence[FactRecord], gate_tasks: Collection[str] = ()) -> None:
        """`gate_tasks`: those that a gate lets requests have. It tells what is asked there, and names tell of what."""
        self._facts = facts
        self._open = self._questions(lambda fact: fact.picture is None and fact.task not in gate_tasks)
        self._shown = self._questions(lambda fact: fact.picture is not None)
        self._pictures = defaultdict[str | None, list[int]](list)  # the numbers of their facts
        for number, fact in enumerate(facts):
            self._pictures[fact.shown].append(number)
        self._about = lru_cache(CACHED_PICTURES)(lambda picture: _Questions(facts, self._pictures[picture]))
        self._gated = [self._questions(partial(_is_of, task)) for task in sorted(gate_tasks)]

    def candidates(self, text: str, *, has_media: bool, picture: str | None = None) -> Candidates:
        """The facts that a text asks for by its words, and those that it may ask for.

        Args:
            has_media: then facts with these pictures are found, and without, those without.
            picture: as that of `AskedQuestion`.
        """
        text = text.strip()  # the chat template may have it in lines of its own
        return self._of_pictures(text, picture) if has_media else self._of_text(text)

    def _of_pictures(self, text: str, picture: str | None) -> Candidates:
        """By words alone: while a request waits for a judge, vLLM sends others with its picture without the data."""
        now = datetime.now(UTC)
        if picture is not None and picture in self._pictures:
            found = self._about(picture).near(text, now)
            return Candidates(_same(found), missed=_missed(found, OTHER_WORDS))
        missed = _missed(self._shown.near(text, now), OTHER_PICTURE)
        return Candidates((), missed=None if missed is None else replace(missed, why=OTHER_PICTURE))

    def _of_text(self, text: str) -> Candidates:
        now, questions = datetime.now(UTC), self._open
        found, named = questions.near(text, now), self._named(text, now)
        same = _same(found)
        if same or not found:
            return Candidates((*same, *named))
        likely = {
            number: each
            for number, each in found.items()
            if each.comparison.differs is None and each.comparison.said >= NEAR and each.comparison.closeness >= CLOSE
        }
        near = dict(list(likely.items())[:MOST_JUDGED])
        return Candidates(named, near, self._pairs(near, text), _missed(found, NOT_JUDGEABLE))

    @property
    def texts(self) -> Sequence[str]:
        """The questions that a request without pictures may ask, by their places."""
        return self._open.texts

    def joined(self, found: Candidates, text: str, places: Sequence[int]) -> Candidates:
        """The candidates of a text, and the questions in these places, which may mean the same, the nearest first.

        Of those that nothing refuses, the nearest by words is judged, then those by meaning, then the others by words.
        """
        text = text.strip()
        meant = self._open.beside(text, places, datetime.now(UTC))
        by_words = list(found.near.items())
        near = dict[int, Found]()
        for number, each in (*by_words[:1], *meant.items(), *by_words[1:]):
            if each.comparison.differs is None and len(near) < MOST_JUDGED:
                near.setdefault(number, each)
        return replace(found, near=near, pairs=self._pairs(near, text))

    def _pairs(self, near: Mapping[int, Found], text: str) -> dict[int, Pair]:
        pairs = {number: Pair(self._open.texts[each.number], text) for number, each in near.items()}
        return {number: pair for number, pair in pairs.items() if all(map(can_be_asked, pair))}

    def _named(self, text: str, now: datetime) -> tuple[AskedFact, ...]:
        """Of each task of the gate, the fact about the same."""
        found = (of_task for task in self._gated for of_task in task.named(text, now))
        return tuple(AskedFact(number, each.comparison.closeness) for number, each in found)

    def resembled(self, fact: FactRecord) -> Candidates:
        """The facts with another answer that a new one's question may ask for."""
        found = self.candidates(fact.question, has_media=fact.picture is not None, picture=fact.shown)
        pairs = {number: pair for number, pair in found.pairs.items() if self._is_other(number, fact)}
        return Candidates((), found.near, pairs)

    def _is_other(self, number: int, fact: FactRecord) -> bool:
        old = self._facts[number]
        return old.id != fact.id and old.answer != fact.answer and old.task == fact.task and old.shown == fact.shown

    def _questions(self, belongs: Callable[..., bool]) -> _Questions:
        return _Questions(self._facts, [number for number, fact in enumerate(self._facts) if belongs(fact)])


def _is_of(task: str, fact: FactRecord) -> bool:
    return fact.task == task and fact.picture is None


def _needs_context(fact: FactRecord) -> bool:
    """Nothing that stands on a conversation is said in another one."""
    return fact.picture is None and kept_of(fact.question).needs_context


def _same(found: Mapping[int, Found]) -> tuple[AskedFact, ...]:
    return tuple(AskedFact(number, 1.0) for number, each in found.items() if each.comparison.is_same)


def _missed(found: Mapping[int, Found], otherwise: str) -> FactMissed | None:
    """`otherwise` says why, if the questions do not differ in what they ask."""
    for number, nearest in found.items():
        comparison = nearest.comparison
        if comparison.said < NEAR:
            return None
        return FactMissed(number, comparison.differs or otherwise, comparison.missing, comparison.added)
    return None


class _Questions:
    """The questions of some facts; of a task's equal ones, the newest."""

    def __init__(self, facts: Sequence[FactRecord], numbers: Sequence[int]) -> None:
        """`numbers` are those of the facts. Of equal questions about several pictures, any stands for all."""
        self._facts = facts
        questions = {number: (facts[number].task, key_of_stored(facts[number].question)) for number in numbers}
        questions = {number: each for number, each in questions.items() if not _needs_context(facts[number])}
        newest = {(*question, facts[number].shown): number for number, question in questions.items()}
        asked = {
            (facts[number].task, key_of_stored(text)): (text, number)
            for number in sorted(newest.values())
            for text in (*facts[number].also, facts[number].question)
        }
        self.texts, self._numbers = [text for text, _ in asked.values()], [number for _, number in asked.values()]
        self._index = QuestionIndex(self.texts, self._numbers)

    def near(self, text: str, now: datetime) -> dict[int, Found]:
        """By the numbers of facts that have not expired, the nearest first, each beside its nearest wording."""
        found = dict[int, Found]()
        for each in self._index.near(text, lambda place: not self._facts[self._numbers[place]].has_expired(now)):
            found.setdefault(self._numbers[each.number], each)
        return found

    def beside(self, text: str, places: Sequence[int], now: datetime) -> dict[int, Found]:
        """As `near`, of the questions in these places."""
        found = dict[int, Found]()
        for each in self._index.beside(text, places):
            if not self._facts[self._numbers[each.number]].has_expired(now):
                found.setdefault(self._numbers[each.number], each)
        return found

    def named(self, text: str, now: datetime) -> Iterator[tuple[int, Found]]:
        """The fact about the same, if it is known that the text asks what the questions ask."""
        found = self._index.named(text, lambda place: not self._facts[self._numbers[place]].has_expired(now))
        if found is not None and found.comparison.is_same:
            yield self._numbers[found.number], found


class StoredAnswers:
    """See the module docstring."""

    def __init__(self, metadata: BundleMetadata, reader: FactReader) -> None:
        self._facts, self.reader = metadata.facts, reader
        self._gate_tasks = frozenset(metadata.gate_tasks)
        self._answer = lru_cache(CACHED_ANSWERS)(lambda number: reader.answer(self._facts[number].answer))

    def find(
        self, asked: AskedFacts, prompt: AskedQuestion, fact_tasks: Collection[str] = ()
    ) -> FactFound | FactMissed | None:
        """The fact that a request is answered with, or the nearest.

        Args:
            asked: what its text and pictures ask for.
            fact_tasks: of the tasks that the gate has, those that it allows.
        """
        now, missed = datetime.now(UTC), asked.missed
        for each in asked.facts:
            fact = self._facts[each.number]
            if fact.has_expired(now):
                continue
            if fact.task not in self._gate_tasks or fact.task in fact_tasks:
                return self._found(each, prompt.begun)
            missed = FactMissed(each.number, f"the gate is closed for {fact.task!r}", (), (), each.odds)
        return missed

    def _found(self, asked: AskedFact, begun: str) -> FactFound:
        number, rest = asked.number, begun.strip()
        if not rest:
            return FactFound(number, asked.closeness, self._answer(number), odds=asked.odds)
        answer = self._facts[number].answer
        if not answer.startswith(rest):
            why = "the request begins the answer in another way"
            return FactFound(number, asked.closeness, withheld=why, odds=asked.odds)
        return FactFound(number, asked.closeness, self.reader.answer(answer[len(rest) :]), odds=asked.odds)
