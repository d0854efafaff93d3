"""Questions that a fact should have answered: which one, what keeps them apart, and the wording that would not.

A question should be answered by a fact that has its answer. Words decide here, as they do where there is no gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from rich.table import Table

from inducekv_vllm.bundle import BundleMetadata, FactRecord
from inducekv_vllm.bundle.metadata import MAX_WORDING_BYTES
from inducekv_vllm.facts import Comparison, QuestionIndex, has_words, same_words
from inducekv_vllm.teaching import replaced_by

from .common import print_table

if TYPE_CHECKING:
    from ..data.examples import Example

NOTHING: Final = "-"
LONGEST: Final = 100  # characters of a question that are shown


@dataclass(frozen=True)
class Miss:
    """A question that no fact answered, or a wrong one."""

    question: str
    answered_by: str | None  # the id of the wrong fact
    should: str | None  # the id of the nearest fact that has its answer; None: it should have been left alone
    why: str
    missing: tuple[str, ...]  # words of the fact's question that it does not say
    added: tuple[str, ...]  # words of it that the fact's question does not say
    wording: str | None  # that would be found if it was added to the fact


def misses(metadata: BundleMetadata, examples: Sequence[Example], found: Sequence[str | None]) -> list[Miss]:
    """Of questions in words alone; of those about pictures, pictures decide.

    Args:
        found: the id of the fact that answered each of the examples.
    """
    served = _served(metadata)
    by_answer: dict[str, list[FactRecord]] = {}
    for fact in served.values():
        by_answer.setdefault(fact.answer.strip(), []).append(fact)
    near = {answer: _Near(facts, metadata) for answer, facts in by_answer.items()}
    missed = []
    for example, id in zip(examples, found, strict=True):
        answer = example.answer.strip()
        is_right = id in served and served[id].answer.strip() == answer if id is not None else answer not in near
        if not is_right and not example.images:
            missed.append(_miss(_question_of(example), id, near.get(answer), served))
    return missed


def _served(metadata: BundleMetadata) -> dict[str, FactRecord]:
    """By id, the facts that can be found by their words."""
    now, replaced = datetime.now(UTC), replaced_by(metadata.facts)
    return {
        fact.id: fact
        for fact in metadata.facts
        if fact.picture is None and fact.id not in replaced and not fact.has_expired(now)
    }


class _Near:
    """Facts of one answer, and the nearest of them to a question."""

    def __init__(self, facts: Sequence[FactRecord], metadata: BundleMetadata) -> None:
        self._asked = [(text, fact) for fact in facts for text in _wordings(fact)]
        self._index = QuestionIndex([text for text, _ in self._asked])
        self._gate_tasks = metadata.gate_tasks

    def to(self, question: str) -> tuple[FactRecord, Comparison | None]:
        """The last one, if none shares a word with it."""
        found = self._index.find(question)
        return (self._asked[-1][1], None) if found is None else (self._asked[found.number][1], found.comparison)

    def why(self, fact: FactRecord, comparison: Comparison | None) -> str:
        """Why it did not answer."""
        if comparison is None:
            return "no word in common"
        if comparison.differs is not None:
            return comparison.differs
        return "another is nearer" if fact.task not in self._gate_tasks else f"the gate is closed for {fact.task!r}"


def _miss(question: str, wrong: str | None, near: _Near | None, served: Mapping[str, FactRecord]) -> Miss:
    if near is None:
        found = None if wrong is None or wrong not in served else QuestionIndex(_wordings(served[wrong])).find(question)
        words = ((), ()) if found is None else (found.comparison.missing, found.comparison.added)
        return Miss(question, wrong, None, "no fact has its answer", *words, None)
    fact, comparison = near.to(question)
    words = ((), ()) if comparison is None else (comparison.missing, comparison.added)
    why = near.why(fact, comparison)
    return Miss(question, wrong, fact.id, why, *words, _wording(question, fact, comparison, served))


def _wordings(fact: FactRecord) -> list[str]:
    return [*fact.also, fact.question]


def _wording(
    question: str, fact: FactRecord, comparison: Comparison | None, served: Mapping[str, FactRecord]
) -> str | None:
    """The question itself, unless it is too long for one, or is another fact's."""
    is_asked = comparison is not None and comparison.is_asked
    if is_asked or len(question.encode()) > MAX_WORDING_BYTES or not has_words(question):
        return None
    words = same_words(question)
    others = (each for each in served.values() if each.task == fact.task and each is not fact)
    taken = any(same_words(text) == words for each in others for text in _wordings(each))
    return None if taken else question


def _question_of(example: Example) -> str:
    """The text of its last turn, which is what facts are found by."""
    return "\n".join(part["text"] for part in example.messages[-1]["content"] if part["type"] == "text")


def print_misses(missed: Sequence[Miss], most: int) -> None:
    """The first of them, as a table."""
    if not missed or not most:
        return
    wrong = sum(miss.answered_by is not None for miss in missed)
    more = "" if len(missed) <= most else f"; the first {most}"
    print(f"\n{len(missed) - wrong} questions that no fact answered and one should have, {wrong} by a wrong one{more}:")
    table = Table("question", "answered by", "should be", "why not", "it does not say", "it says beyond", box=None)
    table.add_column("wording to add")
    for miss in missed[:most]:
        cells = [miss.answered_by, miss.should, miss.why, ", ".join(miss.missing), ", ".join(miss.added), miss.wording]
        table.add_row(_shown(miss.question), *(each or NOTHING for each in cells))
    print_table(table)


def _shown(question: str) -> str:
    """In one line."""
    text = " ".join(question.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
