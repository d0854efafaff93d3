"""Questions that a fact should have answered: which one, and what keeps them apart.

A question should be answered by a fact that has its answer. Of questions about pictures, pictures decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from rich.table import Table

from inducekv_vllm.backbone.stored_facts import REFUSED, StoredQuestions
from inducekv_vllm.bundle import BundleMetadata, FactRecord
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


def misses(metadata: BundleMetadata, examples: Sequence[Example], found: Sequence[str | None]) -> list[Miss]:
    """`found` is the id of the fact that answered each of the examples."""
    served, by_answer = _served(metadata), dict[str, list[FactRecord]]()
    for fact in served.values():
        by_answer.setdefault(fact.answer.strip(), []).append(fact)
    missed = []
    for example, id in zip(examples, found, strict=True):
        answer = example.answer.strip()
        is_right = id in served and served[id].answer.strip() == answer if id is not None else answer not in by_answer
        if not is_right and not example.images:
            missed.append(_miss(_question_of(example), id, by_answer.get(answer, []), metadata.gate_tasks))
    return missed


def _served(metadata: BundleMetadata) -> dict[str, FactRecord]:
    """By id, the facts that can be found by their words."""
    now, replaced = datetime.now(UTC), replaced_by(metadata.facts)
    return {
        fact.id: fact
        for fact in metadata.facts
        if fact.picture is None and fact.id not in replaced and not fact.has_expired(now)
    }


def _miss(question: str, wrong: str | None, should: Sequence[FactRecord], gate_tasks: Sequence[str]) -> Miss:
    if not should:
        return Miss(question, wrong, None, "no fact has its answer")
    found = StoredQuestions(should).candidates(question, has_media=False)
    if found.by_words:
        fact = should[found.by_words[0].number]
        is_gated = fact.task in gate_tasks
        return Miss(question, wrong, fact.id, f"the gate is closed for {fact.task!r}" if is_gated else "another counts")
    if found.pairs:
        return Miss(question, wrong, should[next(iter(found.pairs))].id, f"{REFUSED}, or nobody judges")
    nearest = should[-1] if found.missed is None else should[found.missed.number]
    return Miss(question, wrong, nearest.id, "few words in common" if found.missed is None else found.missed.why)


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
    table = Table("question", "answered by", "should be", "why not", box=None)
    for miss in missed[:most]:
        table.add_row(_shown(miss.question), *(each or NOTHING for each in (miss.answered_by, miss.should, miss.why)))
    print_table(table)


def _shown(question: str) -> str:
    """In one line."""
    text = " ".join(question.split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
