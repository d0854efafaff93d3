"""Which of many stored questions a request asks by words alone, and which it may ask."""

import random
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inducekv_vllm.facts import QuestionIndex, same_words
from inducekv_vllm.facts.language import language_of
from inducekv_vllm.facts.question import read
from inducekv_vllm.facts.rule import SAME, compare

CODE = "What is the code of {}?"
NAMES = ("Lima", "Oslo", "Quito", "Cairo", "Seoul", "Paris", "Delhi", "Tunis", "Hanoi")


def asked(questions: list[str], request: str) -> str | None:
    """The question that words alone say is asked."""
    found = QuestionIndex(questions).near(request)
    return questions[found[0].number] if found and found[0].comparison.is_same else None


def may_be(questions: list[str], request: str) -> list[str]:
    """Those that are left open, the nearest first."""
    return [
        questions[each.number] for each in QuestionIndex(questions).near(request) if each.comparison.differs is None
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is the code of York?", "What is the code of New York?"),
        ("What is the capital of Sudan?", "What is the capital of South Sudan?"),
        ("What is the code of Guinea?", "What is the code of Guinea-Bissau?"),
        ("Who maintains the C library?", "Who maintains the C++ library?"),
        ("What is the rate from EUR to USD?", "What is the rate from USD to EUR?"),
        ("What is new in version 1.2?", "What is new in version 2.1?"),
        ("What is new in version 1.2?", "What is new in version 12?"),
        ("What does 10 % mean?", "What does 10 $ mean?"),
        ("京東のコードは何ですか", "東京のコードは何ですか"),
        ("What does error 500 mean?", "What does error -500 mean?"),
        ("What is f(x)?", "What is f[x]?"),
        ("What is the code of 🇩🇪?", "What is the code of 🇫🇷?"),
        ("How many people work at Acme?", "Which people work at Acme?"),
        ("When does the shop open?", "When does the shop close?"),
        ("Is it?", "Is it so?"),
    ],
)
def test_each_of_two_that_are_alike_has_its_own_answer(one: str, other: str) -> None:
    """Word for word, in other letters, and taught in any order."""
    assert same_words(one) != same_words(other)
    for questions in ([one, other], [other, one]):
        for question in questions:
            for request in (question, question.upper(), f"  {question}!", unicodedata.normalize("NFD", question)):
                assert asked(questions, request) == question
    assert asked([one], other) is None
    assert asked([other], one) is None


@pytest.mark.parametrize("request_", ["", " ", "\n", "?!", "\u200b", "👋", "the of a"])
def test_a_request_that_says_nothing(request_: str) -> None:
    assert QuestionIndex([CODE.format(name) for name in NAMES]).near(request_) == []
    assert QuestionIndex([]).near(request_) == []


FILLED = "It has nothing to do with that. "


@pytest.mark.parametrize(
    "long",
    [
        FILLED * 100_000,
        "word " * 100_000,
        "Berlin wifi password office. " * 100_000,
        "a" * 1_000_000,
        "(" * 1_000_000,
        "東" * 1_000_000,
        "a-" * 500_000,
        "U.S. " * 200_000,
        "\u0301" * 500_000,
        "1" * 500_000,
        "#+" * 500_000,
    ],
)
def test_a_request_of_any_length_takes_little_time(long: str) -> None:
    """It is decided in the worker's step, beside which all others wait: only its beginning and its end are read."""
    index = QuestionIndex(["What is the wifi password of the Berlin office?"])
    index.near("What is the code of Lima?")
    began = time.perf_counter()
    index.near(long)
    assert time.perf_counter() - began < 5  # 1.5 s for the longest on a busy machine, and minutes without a bound


def test_only_some_may_be_found() -> None:
    index = QuestionIndex([CODE.format(name) for name in NAMES])
    for request in (CODE.format("Lima"), "Which code has Lima?"):
        assert index.near(request)[0].number == 0
        assert all(each.number != 0 for each in index.near(request, lambda number: number != 0))
        assert index.near(request, lambda number: False) == []


def test_of_equal_questions_the_last_counts() -> None:
    questions = ["The code of Lima?", CODE.format("Oslo"), "the code of Lima"]
    for request in ("The code of Lima?", "Please tell me the code of Lima"):
        assert QuestionIndex(questions).same_as(request) == 2


def test_where_the_gate_has_told_what_is_asked_names_suffice() -> None:
    """Of what is asked of, all must be said."""
    questions = [CODE.format(name) for name in (*NAMES, "New York", "York")]
    index = QuestionIndex(questions)

    def named(request: str) -> str | None:
        found = index.named(request)
        return questions[found.number] if found is not None and found.comparison.is_same else None

    for name in (*NAMES, "New York", "York"):
        assert named(f"Do you know how {name} is abbreviated?") == CODE.format(name)
    assert named("How is Bonn abbreviated?") is None
    assert named("How is the code abbreviated?") is None


WORDS = (
    *("Lima", "Oslo", "York", "Berlin", "C++", "12", "-12", "2.1", "%"),
    *("wifi", "wireless", "password", "passcode", "vacation", "zirconium", "quokka", "employees", "phone number"),
    *(
        "how many",
        "how much",
        "who",
        "when",
        "where",
        "why",
        "made of",
        "next",
        "not",
        "from",
        "to",
        "the",
        "is",
        "New",
    ),
)
QUESTIONS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(" ".join)


@settings(max_examples=400, deadline=None)
@given(st.lists(QUESTIONS, min_size=1, max_size=8), QUESTIONS)
def test_it_finds_what_comparing_one_by_one_finds(questions: list[str], request: str) -> None:
    """The last of those that are one question with it; or else all that share a term and may be."""

    def one_by_one(number: int) -> str:
        language = language_of(questions[number])
        stored, request_ = read(questions[number], language), read(request, language)
        compared = compare(stored, request_, language)
        if compared.is_same:
            return "same"
        return "open" if compared.differs is None and stored.terms.keys() & request_.terms.keys() else "other"

    kinds = [one_by_one(number) for number in range(len(questions))]
    found = QuestionIndex(questions).near(request)
    if "same" in kinds:
        assert [(each.number, each.comparison) for each in found] == [
            (len(kinds) - 1 - kinds[::-1].index("same"), SAME)
        ]
    else:
        open_ = [each for each in found if each.comparison.differs is None]
        assert {each.number for each in open_} == {number for number, kind in enumerate(kinds) if kind == "open"}
        closeness = [round(each.comparison.closeness, 6) for each in found]
        assert closeness == sorted(closeness, reverse=True)


PIECES = st.sampled_from(
    (
        "What",
        "is",
        "的",
        "東京",
        "コード",
        "Straße",
        "İstanbul",
        "ǆ",
        "ﬁ",
        "C++",
        "#",
        "-5",
        "1.2",
        "(",
        "?",
        ". ",
        "\n",
        "'s",
    )
)
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.one_of(PIECES, st.text(max_size=3))).map(" ".join), QUESTIONS)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, max_size=4), TEXTS)
def test_any_text_may_be_stored_and_asked(questions: list[str], request: str) -> None:
    """Stored, it is found word for word; and nothing that is asked raises."""
    index = QuestionIndex(questions)
    for text in (request, *questions):
        found = index.near(text)
        if text in questions:
            assert found[0].comparison is SAME


def test_many_questions_that_differ_in_one_number() -> None:
    questions = [f"What is the code of locker {number}?" for number in range(10_000)]
    index = QuestionIndex(questions)
    for number in (0, 17, 9_999):
        assert [each.number for each in index.near(f"What is the code of locker {number}?")] == [number]
        (found, *others) = index.near(f"Which code does locker {number} have?")
        assert (found.number, found.comparison.differs) == (number, None)
        assert all(each.comparison.differs is not None for each in others)
    assert all(each.comparison.differs is not None for each in index.near("Which code does locker 10000 have?"))


def test_a_name_among_many_that_have_more_words() -> None:
    """In any order of teaching."""
    names = [f"{first}{vowel}{last}".title() for first in "bdf" for vowel in "aeiou" for last in "lmx"]
    questions, kyoto = [CODE.format(f"Kyoto {name}") for name in names], CODE.format("Kyoto")
    for order in ([kyoto, *questions], [*questions, kyoto]):
        assert may_be(random.Random(0).sample(order, len(order)), "Which code does Kyoto have?") == [kyoto]


def test_the_nearest_question_that_is_not_asked() -> None:
    """Also one that has another name; nothing where no word is the same."""
    index = QuestionIndex([CODE.format(name) for name in ("Lima", "Oslo")])
    nearest, *_ = index.near("What is the code of Quito?")
    assert (nearest.comparison.missing, nearest.comparison.added) == (("oslo",), ("quito",))
    assert nearest.comparison.differs == "it does not name 'oslo'"
    assert index.near("How do I bake bread?") == []
