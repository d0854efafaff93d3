"""Whether a request and a stored question are one question, or surely two, by words; all others are left open."""

import pytest

from inducekv_vllm.facts import Comparison
from inducekv_vllm.facts.language import language_of
from inducekv_vllm.facts.question import read
from inducekv_vllm.facts.rule import compare

WIFI = "What is the wifi password of the Berlin office?"
CLOSES = "When does the warehouse in Leipzig close on Fridays?"


def compared(stored: str, asked: str) -> Comparison:
    language = language_of(stored)
    return compare(read(stored, language), read(asked, language), language)


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        (WIFI, "what is the wi-fi password of the berlin office"),
        (WIFI, "Please tell me what the wifi password of the Berlin office is."),
        (WIFI, "Hello! Could you tell me: what's the wifi password of the Berlin office? Thanks a lot"),
        ("What's your favourite colour?", "What is your favorite color?"),
        ("Where can I find the printer?", "Where I can find the printer?"),
        ("How do I reset my password?", "How do you reset your password?"),
        ("Which rooms aren't heated?", "Which rooms are not heated?"),
        ("Can't I cancel?", "Can I not cancel?"),
        ("What is the code of Lima?", "Code of Lima?"),
        ("What are the opening hours?", "opening hours please"),
        ("Wie lautet der Code von Lima?", "Was ist der Code von Lima"),
        ("Quel est le code du port de la ville ?", "le code du port de la ville"),
        ("What is the code of São Tomé?", "what is the code of sao tome"),
        ("Who organised the party?", "Who organized the party"),
        ("When are the policies renewed?", "When is the policy renewed?"),
        ("Wie lautet der Code von Lima?", "Können Sie mir bitte sagen, wie der Code von Lima lautet?"),
        ("Was heißt das?", "was heisst das"),
        ("¿Cuál es el código de Lima?", "¿Sabes cuál es el codigo de Lima?"),
        ("Quel est le code de Lima ?", "Pouvez-vous me dire quel est le code de Lima, s'il vous plaît ?"),
        ("Qual è il codice di Lima?", "Vorrei sapere qual è il codice di Lima."),
        ("リマのコードは何ですか", "すみません、リマのコードは何ですか？"),
        ("利马的代码是什么", "请问，利马的代码是什么？"),
    ],
)
def test_one_question(stored: str, asked: str) -> None:
    assert compared(stored, asked).is_same
    assert compared(asked, stored).is_same


NOT_JUDGED = [
    ("Is ibuprofen safe with alcohol?", "Is ibuprofen unsafe with alcohol?", "it asks the opposite: 'safe'"),
    ("Is it legal to copy the manual?", "Is it illegal to copy the manual?", "it asks the opposite: 'legal'"),
    ("What does error 500 mean?", "What does error -500 mean?", "'500' is in one of them alone"),
    ('What does "stop" mean?', 'What does "go" mean?', "'go' is quoted in one of them alone"),
    ("Which plans are billed?", "Which plans are not billed?", "one of them is negated"),
    ("What is included?", "What isn't included?", "one of them is negated"),
    (WIFI, "What is the wifi password of the office?", "it does not name 'berlin'"),
    ("What is the capital of Sudan?", "What is the capital of South Sudan?", "it names 'south'"),
    ("What is the code of Guinea?", "What is the code of Guinea-Bissau?", "it names 'bissau'"),
    ("Who is the CEO?", "Who was the CEO?", "tense"),
    ("Who leads the lab?", "Who led the lab?", "another time"),
    ("Who is Anna's employer?", "When did Anna leave?", "another kind"),
    ("Can I return shoes?", "Can I return shoes if worn?", "'if'"),
    ("Can I return shoes while they are new?", "Can I return shoes?", "'while'"),
    ("Wo wird der Vertrag gekündigt?", "Wann wird der Vertrag gekündigt?", "'wann'"),
    ("How do I turn on the alarm?", "How do I turn off the alarm?", "'off'"),
    ("What does shipping to Norway cost?", "What does shipping from Norway cost?", "'from'"),
    ("Who reports to Anna?", "Who does Anna report to?", "the other side"),
    ("Which firm bought Figma?", "Which firm did Figma buy?", "the other side"),
    ("Wer hat Anna geholfen?", "Wem hat Anna geholfen?", "'wem'"),
    ("Are members admitted?", "Are only members admitted?", "'only'"),
    ("When was Acme founded?", "Where was Acme founded?", "'when'"),
    ("Can the pump be repaired?", "How can the pump be repaired?", "'how'"),
    ("Welche Tarife werden berechnet?", "Welche Tarife werden nicht berechnet?", "one of them is negated"),
    ("¿Quién dirige la oficina?", "¿Quién no dirige la oficina?", "one of them is negated"),
]


@pytest.mark.parametrize(("stored", "asked", "reason"), NOT_JUDGED)
def test_surely_two(stored: str, asked: str, reason: str) -> None:
    """With the first thing that makes them two."""
    found = compared(stored, asked)
    assert not found.is_same
    assert found.differs is not None
    assert reason in found.differs


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        (CLOSES, "At what time does the Leipzig warehouse shut on a Friday?"),
        ("What is the return policy?", "What's your policy on returns?"),
        ("What is the capital of Peru?", "Which city is Peru's capital?"),
        ("Which printer prints A3?", "Which printer can do A3?"),
        ("Who is Anna's employer?", "Who is Anna's employee?"),
        ("How do I buy shares?", "How do I sell shares?"),
        ("Is smoking allowed on the balcony?", "I want to know if smoking is allowed on my balcony"),
        ("What does Anna do?", "What is Anna?"),
        ("What is plan A?", "What is the plan?"),
    ],
)
def test_words_cannot_tell(stored: str, asked: str) -> None:
    """What says the same, and what does not."""
    found = compared(stored, asked)
    assert (found.is_same, found.differs) == (False, None)


def test_a_name_may_have_a_typing_error() -> None:
    """In small letters: with a capital it may be another name."""
    assert compared("What is the code of Brandenburg?", "which code does brandenbrug have").differs is None
    assert compared("Where is La Bella located?", "Where is La Belle located?").differs is not None
    assert compared("What is the code of Brandenburg?", "Which code does Hamburg have?").differs is not None


def test_what_is_said_and_what_is_beyond() -> None:
    found = compared("What is the code of Lima?", "What is the area code of Lima?")
    assert (found.missing, found.added) == ((), ("area",))
    assert found.said == 1.0
    assert 0 < found.more < 1
    assert found.closeness == found.said * (1 - found.more)
