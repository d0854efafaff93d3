"""The words of a text: what people write differently is the same word, and what means something else is another."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inducekv_vllm.facts import has_words, same_words
from inducekv_vllm.facts.text import is_number, normalised, words_of


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("What's the code of São Paulo?", "what s the code of são paulo"),
        ("l’ufficio l'ufficio", "l ufficio l ufficio"),
        ("¿AB-12 «ab» 12; 5% of C#", "ab 12 ab 12 5 % of c#"),
        ("Guinea\u2011Bissau - an e-mail, well--", "guinea bissau an e mail well"),
        ("C C++ C# .NET", "c c++ c# net"),
        ("500 -500 +500 1.2 2.1 3,5 12:30 24/7", "500 -500 +500 1.2 2.1 3,5 12:30 24/7"),
        ("5-10 COVID-19 A4 3rd", "5 10 covid 19 a4 3rd"),
        ("f(x) f[x] (x)", "f ( x f [ x x"),
        ("a/b a+b a=b 10€ $10", "a / b a + b a = b 10 € $ 10"),
        ("user_name __init__", "user_name __init__"),
        ("東京の人口", "東京 の 人口"),
        ("東京都の人口", "東京 京都 の 人口"),
        ("東京タワーは2024年", "東京 タワー は 2024 年"),
        ("Name 🏳️‍🌈 and 🇩🇪.", "name 🏳️🌈 and 🇩🇪"),
        ("¿?¡!…—“”", ""),
        (" \n", ""),
    ],
)
def test_words(text: str, words: str) -> None:
    assert [word.text for word in words_of(normalised(text))] == words.split()
    assert same_words(text) == tuple(words.split())
    assert has_words(text) == bool(words)


@pytest.mark.parametrize(
    "written",
    [
        unicodedata.normalize("NFD", "the code of São Tomé"),
        "the ｃｏｄｅ of Ｓão Tomé",
        "the co\u00adde of São To\u200bmé",  # a soft hyphen, and a space of no width
        "\ufeffthe\u2060 code of São Tomé\u200e",
        "THE CODE\u00a0OF SÃO\tTOMÉ",
        "«The code» of... São Tomé?!",
    ],
)
def test_written_otherwise(written: str) -> None:
    assert same_words(written) == same_words("The code of São Tomé")


def test_capitals_and_hyphens_are_kept() -> None:
    words = words_of(normalised("the Guinea-bissau's McDonald iPhone"))
    assert words == [
        ("the", False),
        ("guinea", True),
        ("bissau", True),
        ("s", False),
        ("mcdonald", True),
        ("iphone", False),
    ]


def test_numbers() -> None:
    assert [word for word in ("500", "-500", "1.2", "3rd", "a4", "-", "²") if is_number(word)] == [
        *("500", "-500", "1.2", "3rd"),
        "²",
    ]


@settings(deadline=None)
@given(st.text())
def test_any_text_has_words_that_are_read_again(text: str) -> None:
    """The words of the words are the same, so a text may be shown as its words."""
    words = [word.text for word in words_of(normalised(text))]
    assert all(word and not word.isspace() for word in words)
    assert normalised(normalised(text)) == normalised(text)
