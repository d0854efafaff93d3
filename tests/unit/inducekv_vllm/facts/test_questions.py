"""Which stored question a request asks, against brute force, and from which score on it counts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from inducekv_vllm.facts.threshold import LARGEST, LEAST_OF_FEW

from inducekv_vllm.facts import QuestionIndex, fit_threshold, weight_of, words_of

SIZE = 48
NAMES = ("lima", "oslo", "quito", "cairo", "seoul", "paris", "delhi", "tunis", "hanoi")
CODES = {name: str(number) for number, name in enumerate(NAMES)}
WORDINGS = ("What is the code of {}?", "Which code has {}?", "{} has which code?")


def vectors(words: Sequence[str]) -> npt.NDArray[np.float32]:
    """Words of letters are alike if they begin alike; others are like nothing but themselves."""
    rows = []
    for word in words:
        lengths = (3, len(word)) if word.isalpha() else (len(word),)
        beginnings = [int.from_bytes(word[:n].encode()) for n in lengths]
        parts = [np.random.default_rng(seed).standard_normal(SIZE) for seed in beginnings]
        rows.append(sum(parts) / np.linalg.norm(sum(parts)))
    return np.array(rows, dtype=np.float32)


def index(questions: Sequence[str], answers: Sequence[str]) -> QuestionIndex:
    return QuestionIndex([words_of(each) for each in questions], list(answers), vectors)


def brute_force(questions: Sequence[str], answers: Sequence[str], asked: str) -> list[float]:
    """The formula, in float64, with loops."""
    texts = [words_of(each) for each in questions]
    with_word = {word: {a for t, a in zip(texts, answers, strict=True) if word in t} for t in texts for word in t}
    query = vectors(words_of(asked)).astype(np.float64)
    scores = []
    for words in texts:
        weights = [len(with_word[word]) ** -2.0 for word in words]
        best = [min(1.0, float((query @ vectors([word])[0].astype(np.float64)).max())) for word in words]
        scores.append(sum(w * b for w, b in zip(weights, best, strict=True)) / sum(weights))
    return scores


@pytest.mark.parametrize("asked", ["Tell me the code of Lima!", "Hanoi?", "Which dialling code has Osloo, please?"])
def test_scores_are_those_of_brute_force(asked: str) -> None:
    questions = [WORDINGS[n % 3].format(name) for n, name in enumerate(CODES)]
    found, scores = index(questions, list(CODES.values())).search(words_of(asked))
    expected = np.array(brute_force(questions, list(CODES.values()), asked))
    np.testing.assert_allclose(scores, expected[found], atol=1e-5)
    assert found[0] == expected.argmax()
    assert list(scores) == sorted(scores, reverse=True)


def test_the_shortlist_has_the_best_of_many() -> None:
    names = [f"{a}{b}{c}" for a in "bdfgk" for b in ("ala", "eme", "ono", "uru") for c in "lmnprst"]
    questions = [WORDINGS[n % 3].format(name) for n, name in enumerate(names)]
    many = index(questions, names)
    assert len(many) > 2 * 64
    for name in names[::7]:
        asked = f"Tell me about {name}."
        found, scores = many.search(words_of(asked))
        expected = brute_force(questions, names, asked)
        assert found[0] == int(np.argmax(expected))
        assert scores[0] == pytest.approx(max(expected), abs=1e-5)


def test_known_and_unknown() -> None:
    """In a wording that is not stored: nine facts are found, each by its name; names that are not stored are not."""
    questions = [WORDINGS[0].format(name) for name in CODES]
    asked = index(questions, list(CODES.values()))
    threshold = fit_threshold(asked)
    for number, name in enumerate(CODES):
        found, scores = asked.search(words_of(f"Do you know how {name} is abbreviated?"))
        assert found[0] == number
        assert scores[0] >= threshold
    for name in ("Bonn", "Rome", "Milan"):
        for wording in WORDINGS:
            _, scores = asked.search(words_of(wording.format(name)))
            assert scores[0] < threshold


def test_few_facts_need_their_own_wording() -> None:
    few = index(["What is the code of Lima?", "What is the code of Oslo?"], ["1", "2"])
    assert fit_threshold(few) >= LEAST_OF_FEW
    _, scores = few.search(words_of("What is the code of Quito?"))
    assert scores[0] < fit_threshold(few)
    found, scores = few.search(words_of("what is the code of oslo"))
    assert (found[0], scores[0] >= fit_threshold(few)) == (1, True)


def test_wordings_of_one_fact_are_one_fact() -> None:
    """They would otherwise make its name common, and each other the nearest stranger."""
    questions = [wording.format(name) for wording in WORDINGS for name in CODES]
    several = index(questions, list(CODES.values()) * 3)
    assert fit_threshold(several) < LARGEST
    found, _ = several.search(words_of("Please abbreviate Cairo"))
    assert questions[found[0]].lower().count("cairo") == 1


def test_only_some_may_be_found() -> None:
    questions = [WORDINGS[0].format(name) for name in CODES]
    among = np.array([name != "lima" for name in CODES])
    found, _ = index(questions, list(CODES.values())).search(words_of("The code of Lima?"), among)
    assert 0 not in found
    found, scores = index(questions, list(CODES.values())).search(words_of("Lima"), ~np.ones(len(CODES), dtype=bool))
    assert len(found) == len(scores) == 0


def test_of_equal_questions_the_last_is_first() -> None:
    found, scores = index(["The code of Lima?", "The code of Lima?"], ["1", "2"]).search(words_of("the code of lima?"))
    assert found.tolist() == [1, 0]
    assert scores[0] == pytest.approx(1)


@pytest.mark.parametrize(
    ("stored", "asked", "found"),
    [
        ("Guinea", "Guinea-Bissau", False),
        ("Guinea", "Guinea", True),
        ("Guinea-Bissau", "Guinea-Bissau", True),
        ("Guinea-Bissau", "Guinea Bissau", True),
        ("Guinea-Bissau", "Guinea", False),
        ("Guinea Bissau", "Guinea-Bissau", True),
    ],
)
def test_a_name_with_a_hyphen_is_another_name(stored: str, asked: str, found: bool) -> None:
    names = (*NAMES, stored)
    several = index([WORDINGS[0].format(name) for name in names], names)
    nearest, scores = several.search(words_of(f"Do you know how {asked} is abbreviated?"))
    assert (scores[0] >= fit_threshold(several)) == found
    assert not found or names[nearest[0]] == stored


def test_both_a_name_and_one_that_it_is_part_of() -> None:
    names = (*NAMES, "Guinea", "Guinea-Bissau")
    for several in (names, names[::-1]):
        facts = index([WORDINGS[0].format(name) for name in several], several)
        for asked in ("Guinea", "Guinea-Bissau", "Guinea Bissau"):
            nearest, scores = facts.search(words_of(f"Do you know how {asked} is abbreviated?"))
            assert several[nearest[0]] == asked.replace(" ", "-")
            assert scores[0] >= fit_threshold(facts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("What's the code of São Paulo?", ("what", "s", "the", "code", "of", "são", "paulo")),
        ("¿AB-12 «ab» 12; 5% of C#", ("ab-12", "ab", "12", "5", "%", "of", "c", "#")),
        ("Guinea\u2011Bissau - an e-mail, well--", ("guinea-bissau", "an", "e-mail", "well")),
        ("東京の人口", ("東", "京", "の", "人", "口")),
        ("Name 🏳️‍🌈 and 🇩🇪.", ("name", "🏳️‍🌈", "and", "🇩🇪")),
        (" \n", ()),
    ],
)
def test_words(text: str, words: tuple[str, ...]) -> None:
    assert words_of(text) == words


def test_the_weight_grows_with_the_score() -> None:
    assert weight_of(0.9, 0.9) == pytest.approx(0.5)
    assert weight_of(1.0, 0.9) == pytest.approx(0.99)
    assert weight_of(0.93, 0.9) < weight_of(0.97, 0.9)
