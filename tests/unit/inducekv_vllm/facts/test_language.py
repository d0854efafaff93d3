"""The languages that questions are asked in: each is told from the others, and its file says what it should."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from inducekv_vllm.facts.language import LEAST_WEIGHT, language_of, languages


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
    """A list that is empty would be a silent mistake."""
    assert list(languages()) == ["en", "de", "es", "fr", "it", "ja", "zh"]
    for code, language in languages().items():
        assert language.telling > language.particles | language.negating, code
        assert language.particles, code
        assert language.negating, code
        assert language.opposite, code
        assert not language.ignored & language.telling, code
        assert all(language.tenses), code


def test_common_words_weigh_less() -> None:
    english = languages()["en"]
    rare, usual, common = (english.weight(english.stem(word)) for word in ("zirconium", "actor", "write"))
    assert rare == 1.0
    assert LEAST_WEIGHT <= common < usual < rare
    assert english.is_common(english.stem("writing"))
    assert not english.is_common("zirconium")


def test_threads_may_share_a_language() -> None:
    """Requests are read in the API process's threads; Snowball's stemmers keep state."""
    words = [f"{word}{ending}" for word in ("found", "relation", "general", "nation") for ending in ("ing", "al", "s")]
    german = languages()["de"]
    german.stem.cache_clear()
    expected = [german.stem(word) for word in words]

    def stems(_: int) -> list[str]:
        german.stem.cache_clear()
        return [german.stem(word) for word in words]

    with ThreadPoolExecutor(8) as pool:
        assert all(found == expected for found in pool.map(stems, range(64)))
