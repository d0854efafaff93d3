"""A few facts of a school, as its people ask for them: nine in ten are found in other words, none in place of another.

Of the form that `python -m benchmarks.research.facts.public` measures.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from inducekv_vllm.facts import QuestionIndex
from selector.gate.background import everyday_requests


class Fact(NamedTuple):
    question: str
    same: tuple[str, str, str]
    other: tuple[str, str, str]


FACTS = (
    Fact(
        "What is the door code of the chemistry lab?",
        (
            "what's the chemistry lab's door code",
            "Hello! I forgot my notes in there. Can you tell me the door code of the chemistry lab?",
            "door code chemistry lab",
        ),
        (
            "What is the door code of the biology lab?",
            "Who changed the door code of the chemistry lab?",
            "How do I change the door code of the chemistry lab?",
        ),
    ),
    Fact(
        "Who teaches the evening course in Portuguese?",
        (
            "Who is the teacher of the evening course in Portuguese?",
            "who's teaching the Portuguese evening course?",
            "The evening course in Portuguese, who teaches it?",
        ),
        (
            "Who teaches the evening course in Danish?",
            "When is the evening course in Portuguese?",
            "Who teaches the morning course in Portuguese?",
        ),
    ),
    Fact(
        "When does the library open on Saturdays?",
        (
            "At what time does the library open on Saturdays?",
            "What time does the library open on a Saturday?",
            "On Saturdays, when does the library open?",
        ),
        (
            "When does the library close on Saturdays?",
            "When does the library open on Sundays?",
            "Where is the library?",
        ),
    ),
    Fact(
        "How many books may a pupil borrow at once?",
        (
            "How many books can pupils borrow at once?",
            "What is the number of books that a pupil may borrow at once?",
            "How many books is a pupil allowed to borrow at once?",
        ),
        (
            "How many laptops may a pupil borrow at once?",
            "How many books may a teacher borrow at once?",
            "Where may a pupil borrow books?",
        ),
    ),
    Fact(
        "Where do we hand in lost keys?",
        (
            "Where should lost keys be handed in?",
            "I found some lost keys. Where do we hand them in?",
            "Where can I hand in lost keys?",
        ),
        (
            "Where do we hand in homework?",
            "Who lost the keys?",
            "When do we hand in lost keys?",
        ),
    ),
    Fact(
        "What is the price of a lunch ticket for guests?",
        (
            "How much is a lunch ticket for guests?",
            "price of a guest's lunch ticket",
            "What does a lunch ticket for a guest cost?",
        ),
        (
            "What is the price of a parking ticket for guests?",
            "What is the price of a lunch ticket for pupils?",
            "Who buys lunch tickets for guests?",
        ),
    ),
    Fact(
        "Which printer prints in colour on floor 3?",
        (
            "What printer prints in colour on floor 3?",
            "colour printer floor 3",
            "Which printer on floor 3 prints in colour?",
        ),
        (
            "Which printer prints in colour on floor 2?",
            "Why does no printer print in colour on floor 3?",
            "Who repairs the printer that prints in colour on floor 3?",
        ),
    ),
    Fact(
        "Who is the headmaster of the Ravensburg branch?",
        (
            "who's the headmaster of the branch in Ravensburg?",
            "Tell me the name of the headmaster of the Ravensburg branch.",
            "Who is the headmaster of the Ravensbrug branch?",
        ),
        (
            "Who is the headmaster of the Lindau branch?",
            "Who was the former headmaster of the Ravensburg branch?",
            "When did the headmaster of the Ravensburg branch retire?",
        ),
    ),
)


@pytest.fixture(scope="module")
def index() -> QuestionIndex:
    return QuestionIndex([fact.question for fact in FACTS])


def found(index: QuestionIndex, request: str) -> int | None:
    nearest = index.find(request)
    return nearest.number if nearest is not None and nearest.comparison.is_asked else None


def test_stored_ones_are_all_found(index: QuestionIndex) -> None:
    assert [found(index, fact.question) for fact in FACTS] == list(range(len(FACTS)))


def test_in_other_words_nine_of_ten_are_found(index: QuestionIndex) -> None:
    missed = [asked for at, fact in enumerate(FACTS) for asked in fact.same if found(index, asked) != at]
    assert len(missed) <= 0.1 * 3 * len(FACTS), missed
    assert not [asked for asked in missed if found(index, asked) is not None]  # never another's answer


def test_near_misses_are_left_to_the_model(index: QuestionIndex) -> None:
    answered = [asked for fact in FACTS for asked in fact.other if found(index, asked) is not None]
    assert len(answered) <= 0.05 * 3 * len(FACTS), answered


def test_everyday_requests_are_left_to_the_model(index: QuestionIndex) -> None:
    """At most one in 500, in every language that the package has some of."""
    requests = [request.text for request in everyday_requests()]
    answered = [asked for asked in requests if found(index, asked) is not None]
    assert len(answered) <= 0.002 * len(requests), answered
