"""The comparison of documents: its questions can be answered from the documents, and it judges by their values."""

from itertools import count

import pytest

from benchmarks.document.__main__ import is_right
from benchmarks.document.documents import DOCUMENTS, QUESTIONS, Asked
from benchmarks.document.serving import Way, _body


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_has_the_values_that_are_asked_for(name: str) -> None:
    document, asked = DOCUMENTS[name]()
    assert len({each.question for each in asked}) == len(asked) == QUESTIONS
    for each in asked:
        assert is_right(" ".join(document.text.split()), each), each


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("It opens at 6 bar.", True),
        ("SIX bar.", True),
        ("(6)", True),
        ("46 bar", False),
        ("6.5 bar", False),
        ("0.6 bar", False),
        ("sixty", False),
        ("", False),
    ],
)
def test_an_answer_is_right_if_it_has_the_value_as_a_word(answer: str, right: bool) -> None:
    assert is_right(answer, Asked("At how many bar?", ("6", "six"))) is right


def test_served_requests_find_nothing_in_the_prefix_cache_but_the_cached_document() -> None:
    salts = count()

    def salt(cached: bool) -> str:
        return str(_body(Way("base", str, cached), "Where?", 2, salts)["body"]["cache_salt"])

    assert len({salt(cached=False) for _ in range(3)}) == 3
    assert len({salt(cached=True) for _ in range(3)}) == 1
