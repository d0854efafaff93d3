"""Whether a request asks a stored question: other words for the same do, and what makes it another does not."""

from __future__ import annotations

import pytest

from inducekv_vllm.facts import Comparison, QuestionIndex
from inducekv_vllm.facts.language import language_of
from inducekv_vllm.facts.question import read
from inducekv_vllm.facts.rule import compare

WIFI = "What is the wifi password of the Berlin office?"
CLOSES = "When does the warehouse in Leipzig close on Fridays?"
DATABASE = "Which port does the staging database listen on?"
FOUNDED = "Who founded Acme?"
TALL = "How tall is Anna?"
WARRANTY = "How long is the warranty of the AX-200 router?"
ON_CALL = "Who is the on-call engineer for payments next week?"


def compared(stored: str, asked: str) -> Comparison:
    language = language_of(stored)
    return compare(read(stored, language), read(asked, language), language, {})


def why(stored: str, asked: str) -> str | None:
    """Why a request does not ask the only stored question; "nothing" if it is not even near."""
    found = QuestionIndex([stored]).find(asked)
    return "nothing" if found is None else found.comparison.differs


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        (WIFI, "what's the wifi password in berlin"),
        (WIFI, "Berlin office wifi password please"),
        (WIFI, "Could you tell me the WLAN passcode of our office in Berlin?"),
        (CLOSES, "At what time does the Leipzig warehouse close on a Friday?"),
        (CLOSES, "Until when... I mean, when does the warehouse in Leipzig shut on Fridays?"),
        (FOUNDED, "Who is the founder of Acme?"),
        (FOUNDED, "By whom was Acme founded?"),
        (DATABASE, "What port is the staging database listening on?"),
        ("How many vacation days do employees in Spain get?", "vacation days in spain"),
        ("How do I reset the router?", "Is there a way to reset the router?"),
        ("What does error 500 mean?", "the meaning of error 500"),
        ("What is the rate from EUR to USD?", "rate from EUR to USD"),
        ("What is the code of Guinea-Bissau?", "the code of Guinea Bissau"),
        ("Where is the residue of Almorán stored?", "Where is the remainder of Almorán stored?"),
        ("The architect of Almorán Hall is whom?", "What was the name of the architect of Almorán Hall?"),
        ("How do I reset the router?", "Is there any way to reset the router?"),
        ("Verify the certificate of Almorán", "How do I check the certificate of Almorán?"),
        ("On what team is Mikael Almorán?", "Player Mikael Almorán is on what team?"),
        ("Who performed In My Life?", "In My Life was performed by"),
        ("The Lyon Post was written in which language?", "The language of The Lyon Post is"),
        (TALL, "What is Anna's height?"),
        (TALL, "the height of Anna"),
        (WARRANTY, "How long is the AX-200 router's warranty?"),
        (WARRANTY, "What is the AX-200's warranty?"),
        ("What did Anna die of?", "What was the cause of Anna's death?"),
        ("What is the code of Lima?", "What is the code of the city of Lima?"),
        ("How do I link to a point in time of a YouTube video?", "How do I link to a point in a YouTube video?"),
    ],
)
def test_the_same_in_other_words(stored: str, asked: str) -> None:
    assert why(stored, asked) is None


@pytest.mark.parametrize(
    ("stored", "asked", "reason"),
    [
        (CLOSES, "When does the warehouse close on Fridays?", "it does not name 'leipzig'"),
        ("What is the code of York?", "What is the code of New York?", "it names 'new'"),
        ("What is the code of New York?", "What is the code of York?", "it does not name 'new'"),
        ("What is the capital of Sudan?", "What is the capital of South Sudan?", "it names 'south'"),
        ("What is the code of Guinea?", "What is the code of Guinea-Bissau?", "it names 'bissau'"),
        ("Where was Helen born?", "Where was Helen Hayes born?", "it names 'hayes'"),
        ("What does error 500 mean?", "What does error -500 mean?", "'500' is in one of them alone"),
        ("What is new in version 1.2?", "What is new in version 2.1?", "'1.2' is in one of them alone"),
        ("What does the parser do?", "What does the parser do in 2024?", "'2024' is in one of them alone"),
        ("What is f(x)?", "What is f[x]?", "'(' is in one of them alone"),
        (ON_CALL, "Who is the on-call engineer for payments last week?", "it says 'last'"),
        ("Which plans are billed?", "Which plans are not billed?", "it says 'not'"),
        ("Who is the manager of sales?", "Who is the former manager of sales?", "it says 'former'"),
        (WIFI, "Tell me of the Berlin office", "it says too little of it"),
        (DATABASE, "Which port does the production database listen on?", "it says something else in its place"),
        (CLOSES, "When does the warehouse in Leipzig open on Fridays?", "it says something else in its place"),
        ("What is the rate from EUR to USD?", "What is the rate from USD to EUR?", "it turns it round"),
        ("Did Norway beat Sweden?", "Did Sweden beat Norway?", "it turns it round"),
        (TALL, "How tall was Anna's brother?", "it asks about 'brother'"),
        (TALL, "What is the height of Anna's brother?", "it asks about 'brother'"),
        (TALL, "How tall is the brother of Anna?", "it asks about 'brother'"),
        (TALL, "how tall is Anna's house", "it asks about 'house'"),
        ("Who is the head of sales?", "Who is the wife of the head of sales?", "it asks about 'wife'"),
        (WARRANTY, "How long is the AX-200 router?", "it does not ask about 'warranty'"),
        ("Who heads the Berlin office?", "Who heads the Berlin office's kitchen?", "it asks about 'kitchen'"),
        ("Who heads Acme?", "Who heads Lyon's branch of Acme?", "it asks about 'branch'"),
        ("Who heads Acme?", "Who heads branch 7 of Acme?", "'7' is in one of them alone"),
    ],
)
def test_another_question(stored: str, asked: str, reason: str) -> None:
    """With the first thing that makes it another."""
    assert compared(stored, asked).differs == reason
    assert why(stored, asked) is not None


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("Who maintains the C library?", "Who maintains the C++ library?"),
        ("Who maintains the C++ library?", "Who maintains the C library?"),
        ("京東のコードは何ですか", "東京のコードは何ですか"),
        ("京东的代码是什么？", "东京的代码是什么？"),
        (WIFI, "What is the wifi password of the Lyon office?"),
        (WIFI, "How do I change the wifi password of the Berlin office?"),
        (ON_CALL, "Who is the on-call engineer for search next week?"),
        ("How many vacation days do employees in Spain get?", "How many sick days do employees in Spain get?"),
        (FOUNDED, "When was Acme founded?"),
        (FOUNDED, "Where was Acme founded?"),
        (FOUNDED, "Why was Acme founded?"),
        ("When does the shop close?", "How does the shop close?"),
        ("When does the shop close?", "Where does the shop close?"),
        ("How many people work at Acme?", "Which people work at Acme?"),
        ("When does the cafeteria open?", "When do the cafeteria's new ovens open for baking?"),
    ],
)
def test_near_misses(stored: str, asked: str) -> None:
    """Another name, another thing, or another question word."""
    assert why(stored, asked) is not None


GREETING = "Good morning everyone! I have just moved and my laptop is new. "
THANKS = " I would be grateful for any help. Have a nice day!"


@pytest.mark.parametrize("stored", [WIFI, CLOSES, DATABASE, FOUNDED, ON_CALL])
def test_sentences_around_the_question_do_not_count(stored: str) -> None:
    for asked in (GREETING + stored, stored + THANKS, GREETING + stored + THANKS, f"{GREETING}\n\n{stored}\n{THANKS}"):
        assert why(stored, asked) is None, asked
        assert why(stored, asked.replace(stored, stored[0].lower() + stored[1:])) is None, asked


def test_an_abbreviation_ends_no_sentence() -> None:
    stored = "Who plays for Ayr United F.C. in Scotland?"
    assert why(stored, "who is playing for Ayr United F.C. in Scotland?") is None
    assert why("Who is Dr. van Dam?", "do you know who Dr. van Dam is?") is None


def test_a_question_over_several_sentences() -> None:
    """What is asked may be said in two, but not far from each other."""
    assert why(CLOSES, "I mean the warehouse in Leipzig. When does it close on Fridays?") is None
    far = "It rained. " * 6
    assert why(CLOSES, f"I mean the warehouse in Leipzig. {far}When does it close on Fridays?") is not None


@pytest.mark.parametrize(
    ("stored", "same", "other"),
    [
        (
            "Wie lautet das Kennwort für das WLAN im Büro Berlin?",
            ["Kannst du mir das WLAN-Passwort vom Büro Berlin sagen?", "WLAN-Passwort Büro Berlin"],
            [
                "Wie lautet das Kennwort für das WLAN im Büro Hamburg?",
                "Wer hat das Kennwort für das WLAN im Büro Berlin geändert?",
            ],
        ),
        (
            "Wann schließt die Kantine am Freitag?",
            [
                "Um wie viel Uhr ist die Kantine am Freitag geschlossen?",
                "Um wie viel Uhr schließt die Kantine freitags?",
            ],
            ["Wann öffnet die Kantine am Freitag?", "Wann schließt die Kantine am Montag?", "Wo ist die Kantine?"],
        ),
        (
            "Quel est le mot de passe du wifi au bureau de Lyon ?",
            ["C'est quoi le mot de passe wifi du bureau de Lyon ?", "Le mot de passe du wifi à Lyon, s'il vous plaît"],
            [
                "Quel est le mot de passe du wifi au bureau de Paris ?",
                "Qui a changé le mot de passe du wifi au bureau de Lyon ?",
            ],
        ),
        (
            "¿A qué hora cierra la cafetería los viernes?",
            ["¿Cuándo cierra la cafetería los viernes?", "¿A qué hora cierra la cafetería el viernes, por favor?"],
            ["¿A qué hora abre la cafetería los viernes?", "¿Quién cierra la cafetería los viernes?"],
        ),
        (
            "Qual è la password del wifi dell'ufficio di Milano?",
            ["Mi dici la password wifi dell'ufficio di Milano?", "password del wifi ufficio Milano"],
            [
                "Qual è la password del wifi dell'ufficio di Roma?",
                "Chi cambia la password del wifi dell'ufficio di Milano?",
            ],
        ),
        (
            "大阪オフィスの住所は何ですか",
            ["大阪オフィスの住所を教えてください", "大阪オフィスの住所は？"],
            ["東京オフィスの住所は何ですか", "大阪オフィスの電話番号は何ですか"],
        ),
        (
            "上海办公室的地址是什么？",
            ["请问上海办公室的地址在哪里？", "请告诉我上海办公室的地址"],
            ["北京办公室的地址是什么？", "上海办公室的电话是什么？"],
        ),
    ],
)
def test_other_languages(stored: str, same: list[str], other: list[str]) -> None:
    assert [asked for asked in same if why(stored, asked) is not None] == []
    assert [asked for asked in other if why(stored, asked) is None] == []


def test_a_script_that_nobody_stems() -> None:
    """Words count as they are written."""
    stored = "Какой код у города Лима?"
    assert why(stored, "какой код у города лима") is None
    assert why(stored, "Какой код у города Осло?") is not None
    assert why("서울의 코드는 무엇입니까?", "부산의 코드는 무엇입니까?") is not None


def test_what_is_missing_and_what_is_new() -> None:
    found = compared(DATABASE, "Which port does the production database listen on?")
    assert (found.missing, found.added) == (("staging",), ("production",))
    assert 0.5 < found.said < 1
    assert 0 < found.more < 0.34
    assert found.closeness == pytest.approx(found.said * (1 - found.more))
    everything = compared(DATABASE, "Please: which port does the staging database listen on?")
    assert (everything.said, everything.more, everything.missing, everything.added) == (1.0, 0.0, (), ())
    nothing = compared(DATABASE, "Good morning!")
    assert not nothing.is_asked
    assert nothing.closeness == 0
