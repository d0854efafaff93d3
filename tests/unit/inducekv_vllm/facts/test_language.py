"""The languages that questions are asked in: each is told from the others, and its file says what it should."""

from __future__ import annotations

import tomllib
from concurrent.futures import ThreadPoolExecutor

import pytest

from inducekv_vllm.facts.language import FOLDER, LEAST_WEIGHT, language_of, languages

KINDS = {"who", "when", "where", "country", "city", "why", "count", "how", "may", "what", "whether"}


@pytest.mark.parametrize(
    ("question", "code"),
    [
        ("What is the code of Lima?", "en"),
        ("Wie lautet der Code von Lima?", "de"),
        ("Quel est le code de Lima ?", "fr"),
        ("¿Cuál es el código de Lima?", "es"),
        ("Qual è il codice di Lima?", "it"),
        ("リマのコードは何ですか", "ja"),
        ("東京のコードは何ですか", "ja"),
        ("利马的代码是什么", "zh"),
        ("What is 東京 in English?", "en"),
        ("¿Qué significa 東京?", "es"),
        ("東京", "zh"),
        ("Lima", "en"),
        ("Какой код у Лимы?", "en"),  # nobody stems it
        ("", "en"),
    ],
)
def test_the_language_of_a_question(question: str, code: str) -> None:
    assert language_of(question).code == code


def test_each_file() -> None:
    """A question word that no rule knows, or a contrasting word that is never looked at, would be a silent mistake."""
    assert list(languages()) == ["en", "de", "es", "fr", "it", "ja", "zh"]
    for code, language in languages().items():
        kinds = tomllib.loads((FOLDER / f"{code}.toml").read_text(encoding="utf-8"))["asks"].keys()
        assert {"who", "when", "where", "why", "count", "what"} <= kinds <= KINDS, code
        assert language.contrasting, code
        assert language.directed, code
        assert language.same, code
        assert all(phrase for phrase in language.same), code


def test_common_words_weigh_less() -> None:
    english = languages()["en"]
    rare, usual, common = (english.weight(english.stem(word)) for word in ("zirconium", "actor", "write"))
    assert rare == 1.0
    assert LEAST_WEIGHT <= common < usual < rare
    assert english.is_common(english.stem("writing"))
    assert not english.is_common("zirconium")


def test_words_of_a_line_are_one_sense() -> None:
    english = languages()["en"]

    def senses(phrase: str) -> frozenset[int]:
        return english.same.get(tuple(english.stems(phrase)), frozenset())

    assert senses("password") & senses("passcode")
    assert senses("phone number") & senses("telephone")
    assert not senses("vacation") & senses("sick")
    assert not senses("open") & senses("close")


def test_threads_may_share_a_language() -> None:
    """Decisions are made in the worker's step and in the API process's threads; Snowball's stemmers keep state."""
    words = [f"{word}{ending}" for word in ("found", "relation", "general", "nation") for ending in ("ing", "al", "s")]
    german = languages()["de"]
    german.stem.cache_clear()
    expected = [german.stem(word) for word in words]

    def stems(_: int) -> list[str]:
        german.stem.cache_clear()
        return [german.stem(word) for word in words]

    with ThreadPoolExecutor(8) as pool:
        assert all(found == expected for found in pool.map(stems, range(64)))


def test_related_words_are_related_both_ways_in_english_alone() -> None:
    english, german = languages()["en"], languages()["de"]
    pair = english.stem("salary"), english.stem("wage")
    assert pair[0] in english.related(pair[1])
    assert pair[1] in english.related(pair[0])
    assert not english.related("zirconium")
    assert not german.related(german.stem("gehalt"))
