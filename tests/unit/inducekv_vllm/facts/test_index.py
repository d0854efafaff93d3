"""Which of many stored questions a request asks: the one that comparing with each of them finds."""

from __future__ import annotations

import random
import time
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rapidfuzz.distance import OSA

from inducekv_vllm.facts import SAME, Comparison, QuestionIndex, same_words
from inducekv_vllm.facts.language import language_of
from inducekv_vllm.facts.question import read
from inducekv_vllm.facts.rule import compare

CODE = "What is the code of {}?"
NAMES = ("Lima", "Oslo", "Quito", "Cairo", "Seoul", "Paris", "Delhi", "Tunis", "Hanoi")


def asked(questions: list[str], request: str) -> str | None:
    """The question that is found to be asked."""
    found = QuestionIndex(questions).find(request)
    return questions[found.number] if found is not None and found.comparison.is_asked else None


SPORTS = [
    f"{first}{second}"
    for first in ("quarter", "half", "line", "corner", "full")
    for second in ("back", "backer", "keeper", "kicker")
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


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        ("Tell me the code of York!", "York"),
        ("the code of New York, please", "New York"),
        ("code for york", "York"),
        ("Which code has New York City?", None),
    ],
)
def test_a_name_and_one_that_it_is_part_of(request_: str, found: str | None) -> None:
    names = ["York", "New York"]
    for several in (names, names[::-1]):
        assert asked([CODE.format(name) for name in several], request_) == (found and CODE.format(found))


@pytest.mark.parametrize(
    "request_",
    [
        unicodedata.normalize("NFD", "Which code has São Tomé?"),
        "Which ｃｏｄｅ has Ｓão Tomé?",
        "Which co\u00adde has São To\u200bmé\u200e?",
        "\ufeffWhich code has sÃo tomé",
    ],
)
def test_written_otherwise(request_: str) -> None:
    stored = CODE.format("São Tomé")
    for question in (stored, unicodedata.normalize("NFD", stored)):
        assert asked([question, CODE.format("Lima")], request_) == question


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("Brandenburg", "Brandenbrug"),  # two letters changed places
        ("Brandenburg", "Brandenburgg"),
        ("Brandenburg", "Brandnburg"),
        ("Brandenburg", "Brandenborg"),
        ("Quito", "Qiuto"),
        ("Ulaanbaatar", "ulaanbatar"),
    ],
)
def test_one_typing_error(name: str, typed: str) -> None:
    questions = [CODE.format(each) for each in (*NAMES, "Brandenburg", "Ulaanbaatar")]
    assert asked(questions, CODE.format(typed)) == CODE.format(name)
    assert asked(questions, f"Please tell me which code {typed} has") == CODE.format(name)


@pytest.mark.parametrize("typed", ["Brndnburg", "Hamburg", "Brandenbergen", "Liam", "Olso", "500"])
def test_two_errors_or_a_short_word_are_another_word(typed: str) -> None:
    assert asked([CODE.format(each) for each in (*NAMES, "Brandenburg", "501")], CODE.format(typed)) is None


def test_a_stored_word_is_no_typing_error_of_another() -> None:
    questions = [CODE.format(name) for name in ("Marlin", "Merlin", "Berlin")]
    for question in questions:
        assert asked(questions, question.replace("What is", "Tell me")) == question


FEW_SYLLABLES = ("ka", "lo", "mi", "ra", "ne", "tu")
SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnrstv" for vowel in "aeiou")


@pytest.mark.parametrize("syllables", [FEW_SYLLABLES, SYLLABLES])
@pytest.mark.parametrize(
    ("stored", "wordings"),
    [
        ("How long is the river {}?", ("What is the length of the {} river?", "Please tell me how long the {} is.")),
        ("What is the price of the {}?", ("How much does the {} cost?", "the {}'s price")),
    ],
)
def test_made_up_names_that_are_alike(syllables: tuple[str, ...], stored: str, wordings: tuple[str, ...]) -> None:
    """Thirty of sixty are taught. Of the others, only those that a typing error makes of a taught one are answered."""
    drawn, names = random.Random(0), dict[str, None]()
    while len(names) < 60:
        names["".join(drawn.choice(syllables) for _ in range(3)).capitalize()] = None
    taught, others = list(names)[:30], list(names)[30:]
    questions = [stored.format(name) for name in taught]
    index = QuestionIndex(questions)
    for name in names:
        for wording in wordings:
            found = index.find(wording.format(name))
            answered = questions[found.number] if found is not None and found.comparison.is_asked else None
            if name in taught:
                assert answered == stored.format(name)
            elif all(OSA.distance(name, each) > 1 for each in taught):
                assert answered is None
    assert any(OSA.distance(name, each) > 1 for name in others for each in taught)


def test_a_typing_error_of_two_stored_words_is_none_of_them() -> None:
    """In any order of teaching."""
    names = [
        f"{first}{vowel}{last}" for first in ("M", "Br", "Tr") for last in ("rlin", "nda", "stor") for vowel in "aeio"
    ]
    for at in range(0, len(names), 4):
        four = [CODE.format(name) for name in names[at : at + 4]]
        typed = four[0].replace(names[at], names[at].replace("a", "x", 1))
        assert {asked(order, typed) for order in (four, four[::-1])} == {None}


def test_a_question_whose_words_are_all_common() -> None:
    """It is found without its function words, too."""
    assert asked(["How many write?"], "write") == "How many write?"


def test_a_question_of_stop_words_alone() -> None:
    questions = ["Is it?", "What is this?", "Who are you?", CODE.format("Lima")]
    for question in questions[:3]:
        assert asked(questions, question.lower()) == question
    for request in ("of the", "Is that so?", "Who are they?", "What is the code?", "Tell me"):
        assert asked(questions, request) is None


@pytest.mark.parametrize("request_", ["", " ", "\n", "?!", "\u200b", "👋", "the of a"])
def test_a_request_that_says_nothing(request_: str) -> None:
    assert QuestionIndex([CODE.format(name) for name in NAMES]).find(request_) is None
    assert QuestionIndex([]).find(request_) is None


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
    index.find("What is the code of Lima?")
    began = time.perf_counter()
    index.find(long)
    assert time.perf_counter() - began < 5  # 1.5 s for the longest on a busy machine, and minutes without a bound


def test_the_beginning_and_the_end_of_a_long_request_are_read() -> None:
    question = "What is the wifi password of the Berlin office?"
    for request in (f"{question} {FILLED * 5000}", f"{FILLED * 5000} {question}"):
        assert asked([question], request) == question
    assert asked([question], f"{FILLED * 5000} {question} {FILLED * 5000}") is None
    long = f"{FILLED * 1000} {question}"
    assert asked([long], long) == long  # a stored one, word for word


def test_only_some_may_be_found() -> None:
    questions = [CODE.format(name) for name in NAMES]
    index = QuestionIndex(questions)
    for request in (questions[0], "Which code has Lima?"):
        found = index.find(request, lambda number: number != 0)
        assert found is None or (found.number != 0 and not found.comparison.is_asked)
        assert index.find(request, lambda number: False) is None


def test_of_equal_questions_the_last_counts() -> None:
    questions = ["The code of Lima?", CODE.format("Oslo"), "the code of Lima"]
    for request in ("The code of Lima?", "Please tell me the code of Lima"):
        found = QuestionIndex(questions).find(request)
        assert found is not None
        assert (found.number, found.comparison.differs) == (2, None)


def test_where_the_gate_has_told_what_is_asked_names_suffice() -> None:
    """Of what is asked of, all must be said, and no other name beside it."""
    questions = [CODE.format(name) for name in (*NAMES, "New York", "York")]
    index = QuestionIndex(questions)

    def named(request: str) -> str | None:
        found = index.find(request, names_suffice=True)
        return questions[found.number] if found is not None and found.comparison.is_asked else None

    for name in (*NAMES, "New York", "York"):
        assert named(f"Do you know how {name} is abbreviated?") == CODE.format(name)
    assert named("How is Bonn abbreviated?") is None
    assert named("How is Paris Hilton abbreviated?") is None
    assert named("How is the code abbreviated?") is None


def test_the_questions_of_several_languages() -> None:
    questions = [
        "What is the code of Lima?",
        "Wie lautet der Code von Lima?",
        "¿Cuál es el código de Lima?",
        "リマのコードは何ですか",
        "利马的代码是什么？",
    ]
    requests = [
        "Tell me the code of Lima",
        "Wie lautet denn bitte der Code von Lima?",
        "Dime el código de Lima, por favor",
        "リマのコードを教えてください",
        "请问利马的代码是什么",
    ]
    assert [asked(questions, request) for request in requests] == questions


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


def one_by_one(questions: list[str], request: str) -> list[Comparison]:
    """The rule for each stored question; no word of `WORDS` may stand for another one with a typing error."""
    found = []
    for question in questions:
        language = language_of(question)
        same = same_words(question) == same_words(request)
        compared = compare(read(question, language), read(request, language), language, {})
        found.append(SAME if same else compared)
    return found


def best(questions: list[str], comparisons: list[Comparison]) -> tuple[float, set[str]] | None:
    """How close the closest question that is asked is, and which are as close."""
    closeness = [round(each.closeness, 6) if each.is_asked else -1.0 for each in comparisons]
    if not closeness or max(closeness) < 0:
        return None
    exact = {question for question, each in zip(questions, comparisons, strict=True) if each is SAME}
    closest = {question for question, each in zip(questions, closeness, strict=True) if each == max(closeness)}
    return max(closeness), exact or closest


@settings(max_examples=400, deadline=None)
@given(st.lists(QUESTIONS, min_size=1, max_size=8), QUESTIONS, st.randoms(use_true_random=False))
def test_it_finds_what_comparing_one_by_one_finds(questions: list[str], request: str, order: random.Random) -> None:
    """In any order of teaching; of those that are as close, the last."""
    expected = best(questions, one_by_one(questions, request))
    shuffled = order.sample(questions, len(questions))
    for stored in (questions, shuffled):
        found = QuestionIndex(stored).find(request)
        if expected is None:
            assert found is None or not found.comparison.is_asked
        else:
            assert found is not None
            assert found.comparison.is_asked, (stored, expected)
            assert round(found.comparison.closeness, 6) == expected[0]
            assert found.number == max(at for at, each in enumerate(stored) if each in expected[1])


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
        "e\u0301",
    )
)
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.one_of(PIECES, st.text(max_size=3))).map(" ".join), QUESTIONS)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, max_size=4), TEXTS)
def test_any_text_may_be_stored_and_asked(questions: list[str], request: str) -> None:
    """Stored, it is found word for word, if it has words; and nothing that is asked raises."""
    index = QuestionIndex(questions)
    for text in (request, *questions):
        found = index.find(text)
        if text in questions:
            assert found is not None
            assert found.comparison is SAME
            assert same_words(questions[found.number]) == same_words(text)


def test_many_questions_that_share_words() -> None:
    """More than are compared."""
    names = [f"{a}{b}{c}" for a in "BDFGK" for b in ("ala", "eme", "ono", "uru") for c in "lmnprst"]
    questions = [
        wording.format(name)
        for name in names
        for wording in (CODE, "Who founded the port of {}?", "How many people live in {}?")
    ]
    index = QuestionIndex(questions)
    assert len(index) == 420
    for at, name in enumerate(names):
        requests = (f"Which code has {name}?", f"Who is the founder of {name}'s port?", f"the population of {name}")
        for offset, request in enumerate(requests):
            found = index.find(request)
            assert found is not None
            assert (questions[found.number], found.comparison.differs) == (questions[3 * at + offset], None)


def test_the_nearest_question_that_is_not_asked() -> None:
    """Also one that has another name, which no request for this one can ask; nothing where no word is the same."""
    index = QuestionIndex([CODE.format(name) for name in ("Lima", "Oslo")])
    found = index.find("What is the code of Quito?")
    assert found is not None
    assert (found.comparison.missing, found.comparison.added) == (("oslo",), ("quito",))
    assert found.comparison.differs == "it does not name 'oslo'"
    assert index.find("How do I bake bread?") is None


def test_a_name_among_many_that_have_more_words() -> None:
    """In any order of teaching."""
    names = [f"{first}{vowel}{last}".title() for first in "bdf" for vowel in "aeiou" for last in "lmr"]
    questions, kyoto = [CODE.format(f"Kyoto {name}") for name in names], CODE.format("Kyoto")
    for order in ([kyoto, *questions], [*questions, kyoto]):
        assert asked(order, "Tell me the code of Kyoto, please.") == kyoto


def test_names_count_more_than_one_word_under_several_keys() -> None:
    """A word that a question is kept under as it is written, by its stem and by what it means is one word."""
    questions = ["Which sport is FC Groningen associated with?"]
    questions += [f"Which sport is {word} associated with?" for word in SPORTS]
    found = QuestionIndex(questions).find("FC Groningen is associated with the sport of")
    assert found is not None
    assert (found.number, found.comparison.is_asked) == (0, True)
