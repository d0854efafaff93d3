"""How questions are asked in a language: its function words, its question words, and words that ask the same.

A file a language in `languages/`. Stems are Snowball's [https://snowballstem.org]. How common a word is was counted in
the everyday requests of `selector.gate.background` (`python -m benchmarks.research.facts.common_words`). English words
that ask the same are WordNet's, too (`python -m benchmarks.research.facts.related_words`).
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Final

import snowballstemmer

from .text import Word, normalised, words_of

FOLDER: Final = Path(__file__).parent / "languages"
COMMON_WORDS: Final = FOLDER / "common_words.json"
RELATED_WORDS: Final = FOLDER / "related_words.json"
ENGLISH: Final = "en"
CACHED_STEMS: Final = 1 << 16
LEAST_WEIGHT: Final = 0.25  # of a word that is no function word
COMMON: Final = 12  # a word of every 12th everyday request has the least weight
_HIRAGANA: Final = re.compile(r"[\u3040-\u309f]+")
_KANA: Final = re.compile(r"[\u3040-\u30ff]")
_BETWEEN: Final = re.compile(r"\W+")
_NOTHING: Final = r"(?!)"
_HAN: Final = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")


class Language:
    """See the module docstring. Any thread may use it."""

    def __init__(
        self, code: str, described: Mapping[str, Any], counted: Mapping[str, Any], known: Mapping[str, Any]
    ) -> None:
        """
        Args:
            described: what the language's file has.
            counted: the number of everyday `requests`, and of those with each of the `stems` that several have.
            known: of a dictionary, stems with the `related` ones that come after them, and those of words for `people`.
        """
        self.code = code
        self._stemmer = snowballstemmer.stemmer(described["stemmer"]) if described["stemmer"] else None
        self._lock = Lock()  # a stemmer keeps the word that it works at
        self.stem = lru_cache(CACHED_STEMS)(self._stem)
        self._between = sorted(described.get("between", "").split(), key=len, reverse=True)
        self._function = frozenset(word.text for word in self.words(described["function"]))
        self.capital_words = frozenset(described.get("capital_words", "").split())  # which are no names for that
        self.capitalises_nouns = bool(described.get("capitalises_nouns", False))
        self.contrasting = frozenset(self.stems(described["contrast"]))
        self.directed = frozenset(word.text for word in self.words(described["directed"]))
        self.owning = frozenset(described.get("owning", "").split())  # what says that one thing is another's
        self.kinds_of_names = frozenset(described.get("kinds_of_names", "").split())  # the city of Lima is Lima
        self.prepositions = frozenset(described.get("prepositions", "").split())  # others than those of `owning`
        self.same = _same([[tuple(self.stems(each)) for each in line.split(",")] for line in described["same"]])
        self.longest_phrase = max(map(len, self.same))
        self.politely = _pattern(described["politely"])
        self.empty = _pattern(described.get("empty", ()))
        kinds: Mapping[str, Sequence[str]] = described["asks"]
        self.asking = {kind: self._asking(phrases[0]) for kind, phrases in kinds.items()}
        self._kinds = {phrase: kind for kind, phrases in kinds.items() for phrase in map(_plain, phrases)}
        self.asks = _pattern(self._kinds)
        self._related = _both_ways(known.get("related", {}))
        self.people = frozenset(str(known.get("people", "")).split())
        self._requests, self._counts = int(counted.get("requests", 0)), dict(counted.get("stems", {}))

    def words(self, text: str) -> list[Word]:
        """Of a text; in Chinese, without what stands between words."""
        text = normalised(text)
        for each in self._between:
            text = text.replace(each, " ")
        return words_of(text)

    def stems(self, text: str) -> list[str]:
        return [self.stem(word.text) for word in self.words(text)]

    def is_function_word(self, word: str) -> bool:
        return word in self._function or (self.code == "ja" and _HIRAGANA.fullmatch(word) is not None)

    def is_common(self, stem: str) -> bool:
        """Whether several everyday requests have it."""
        return stem in self._counts

    def weight(self, stem: str) -> float:
        """How much a word tells: 1 if no everyday request has it, `LEAST_WEIGHT` if many have."""
        if (count := self._counts.get(stem, 0)) == 0:
            return 1.0
        return max(LEAST_WEIGHT, 1 - math.log(1 + count) / math.log(1 + self._requests / COMMON))

    def related(self, stem: str) -> frozenset[str]:
        """The stems of words that may ask the same, by a dictionary."""
        return self._related.get(stem, frozenset())

    def _stem(self, word: str) -> str:
        if self._stemmer is None or not word.isalpha():
            return word
        with self._lock:
            return str(self._stemmer.stemWord(word))

    def kind_of(self, question_word: str) -> str:
        """What a word or phrase that `asks` has found asks for."""
        return self._kinds[_plain(question_word)]

    def _asking(self, word: str) -> tuple[str, frozenset[int]]:
        """The word for what a kind of question asks for, and the lines of `same` that have it."""
        return word, self.same.get(tuple(self.stems(word)), frozenset())


def _same(lines: Iterable[Iterable[tuple[str, ...]]]) -> dict[tuple[str, ...], frozenset[int]]:
    """The numbers of the lines that have each word or phrase."""
    lines_of: dict[tuple[str, ...], set[int]] = {}
    for number, phrases in enumerate(lines):
        for phrase in phrases:
            lines_of.setdefault(phrase, set()).add(number)
    return {phrase: frozenset(numbers) for phrase, numbers in lines_of.items() if phrase}


def _both_ways(related: Mapping[str, str]) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for stem, others in related.items():
        for other in others.split():
            found.setdefault(stem, set()).add(other)
            found.setdefault(other, set()).add(stem)
    return {stem: frozenset(others) for stem, others in found.items()}


def _plain(phrase: str) -> str:
    return _BETWEEN.sub(" ", normalised(phrase))


def _pattern(phrases: Iterable[str]) -> re.Pattern[str]:
    """Finds the longest of the phrases that begin at a place."""
    longest = sorted(map(_plain, phrases), key=len, reverse=True)
    patterns = [re.escape(each).replace(r"\ ", r"\W+") for each in longest]
    spaced = [
        pattern if _is_unspaced(phrase) else rf"(?<!\w){pattern}(?!\w)"
        for phrase, pattern in zip(longest, patterns, strict=True)
    ]
    return re.compile("|".join(spaced) or _NOTHING)


def _is_unspaced(text: str) -> bool:
    return _KANA.search(text) is not None or _HAN.search(text) is not None


@cache
def languages() -> dict[str, Language]:
    """By their ISO 639-1 codes, English first."""
    counted = json.loads(COMMON_WORDS.read_text(encoding="utf-8"))
    known = {ENGLISH: json.loads(RELATED_WORDS.read_text(encoding="utf-8"))}
    codes = sorted((path.stem for path in FOLDER.glob("*.toml")), key=lambda code: (code != ENGLISH, code))
    described = {code: tomllib.loads((FOLDER / f"{code}.toml").read_text(encoding="utf-8")) for code in codes}
    return {code: Language(code, each, counted.get(code, {}), known.get(code, {})) for code, each in described.items()}


def language_of(text: str) -> Language:
    """The language that a question is written in: the one whose function words it has most of; English, if none has."""
    known = languages()
    if _KANA.search(text):
        return known["ja"]
    words = {word.text for word in words_of(normalised(text))}
    best = max(known.values(), key=lambda each: sum(map(each.is_function_word, words)))  # of equals, the first
    return known["zh"] if _HAN.search(text) and not any(map(best.is_function_word, words)) else best
