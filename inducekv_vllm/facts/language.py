"""How questions are asked in a language: its function words, and the words that make another question of one.

A file a language in `languages/`. Stems are Snowball's [https://snowballstem.org]. How common a word is was counted in
the everyday requests of `selector.gate.background` (`python -m benchmarks.research.facts.common_words`).
"""

import json
import math
import re
import tomllib
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, Final

import snowballstemmer

from .text import Word, normalised, without_accents, words_of

FOLDER: Final = Path(__file__).parent / "languages"
COMMON_WORDS: Final = FOLDER / "common_words.json"
ENGLISH: Final = "en"
CACHED_STEMS: Final = 1 << 16
LEAST_WEIGHT: Final = 0.25  # of a word that is no function word
COMMON: Final = 12  # a word of every 12th everyday request has the least weight
_HIRAGANA: Final = re.compile(r"[\u3040-\u309f]+")
_KANA: Final = re.compile(r"[\u3040-\u30ff]")
_HAN: Final = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_NOTHING: Final = r"(?!)"


class Language:
    """See the module docstring. Any thread may use it."""

    def __init__(self, code: str, described: Mapping[str, Any], counted: Mapping[str, Any]) -> None:
        """
        Args:
            described: what the language's file has.
            counted: the number of everyday `requests`, and of those with each of the `stems` that several have.
        """
        self.code, self.is_spaced = code, code not in ("ja", "zh")
        self._stemmer = snowballstemmer.stemmer(described["stemmer"]) if described["stemmer"] else None
        self._lock = Lock()  # a stemmer keeps the word that it works at
        self.stem = lru_cache(CACHED_STEMS)(self._stem)
        self.capitalises_nouns = bool(described.get("capitalises_nouns", False))
        self._between = sorted(described.get("between", "").split(), key=len, reverse=True)
        self._spelled = [(re.compile(each, re.I), instead) for each, instead in described.get("spelled", ())]
        self._politely = self._phrases(described["politely"])
        self._function = self._listed(described["function"])
        self.ignored, self.moving = self._listed(described["ignored"]), self._listed(described["moving"])
        phrases = described.get("naming", "").split(",")
        self.naming = frozenset(tuple(word.text for word in words_of(self.plain(normalised(each)))) for each in phrases)
        self.particles, self.negating = self._listed(described["particles"]), self._listed(described["negating"])
        self.telling = self._listed(described["telling"]) | self.particles | self.negating
        self.asking, self.supporting = (self._listed(described.get(each, "")) for each in ("asking", "supporting"))
        context = described.get("context", {})
        self.leading, self.personal, self.referring, self.addressing = (
            self._listed(context.get(each, "")) for each in ("leading", "personal", "referring", "addressing")
        )
        self._follows = re.compile(context["follows"], re.I) if "follows" in context else re.compile(_NOTHING)
        self.tenses, self.kinds = ([self._listed(each) for each in described.get(of, ())] for of in ("tenses", "kinds"))
        self.conditions = self._listed(described.get("conditions", ""))
        self.past = {past: self.stem(now) for past, now in map(str.split, described.get("past", ()))}
        self.opposite = tuple(described["opposite"].split())
        self._requests, self._counts = int(counted.get("requests", 0)), dict(counted.get("stems", {}))

    def plain(self, text: str) -> str:
        """A normalised text without what only makes it polite, each word in one spelling."""
        text = self._politely.sub(" ", text)
        for pattern, instead in self._spelled:
            text = pattern.sub(instead, text)
        return without_accents(text)

    def words(self, plain: str) -> list[Word]:
        """In Chinese, without those that stand between others."""
        for each in self._between:
            plain = plain.replace(each, " ")
        return words_of(plain)

    def said(self, listed: frozenset[str], plain: str) -> frozenset[str]:
        """Those of the listed words that a text has."""
        if not self.is_spaced:
            return frozenset(word for word in listed if word in plain)
        return listed & {word.text for word in words_of(plain)}

    def follows(self, plain: str) -> bool:
        """Whether a text begins like an answer, or like a question that follows another one."""
        return self._follows.match(plain.strip()) is not None

    def is_function_word(self, word: str) -> bool:
        return (
            word in self._function
            or word in self.telling
            or (self.code == "ja" and _HIRAGANA.fullmatch(word) is not None)
        )

    def weight(self, stem: str) -> float:
        """How much a word tells: 1 if no everyday request has it, `LEAST_WEIGHT` if many have."""
        if (count := self._counts.get(stem, 0)) == 0:
            return 1.0
        return max(LEAST_WEIGHT, 1 - math.log(1 + count) / math.log(1 + self._requests / COMMON))

    def is_common(self, stem: str) -> bool:
        """Whether several everyday requests have it."""
        return stem in self._counts

    def _listed(self, words: str) -> frozenset[str]:
        """Spelled as `plain` spells them."""
        if not self.is_spaced:
            return frozenset(words.split())
        plain = without_accents(normalised(words))
        return frozenset(word.text for text in (plain, self.plain(normalised(words))) for word in words_of(text))

    def _phrases(self, listed: str) -> re.Pattern[str]:
        """Finds the longest of the phrases that begin at a place."""
        phrases = sorted((each.strip() for each in listed.split(",")), key=len, reverse=True)
        edge = (r"(?<!\w)", r"(?!\w)") if self.is_spaced else ("", "")
        patterns = [edge[0] + r"\W+".join(map(re.escape, each.split())) + edge[1] for each in phrases if each]
        return re.compile("|".join(patterns) or _NOTHING, re.I)

    def _stem(self, word: str) -> str:
        if self._stemmer is None or not word.isalpha():
            return word
        with self._lock:
            return str(self._stemmer.stemWord(word))


@cache
def languages() -> dict[str, Language]:
    """By their ISO 639-1 codes, English first."""
    counted = json.loads(COMMON_WORDS.read_text(encoding="utf-8"))
    codes = sorted((path.stem for path in FOLDER.glob("*.toml")), key=lambda code: (code != ENGLISH, code))
    described = {code: tomllib.loads((FOLDER / f"{code}.toml").read_text(encoding="utf-8")) for code in codes}
    return {code: Language(code, each, counted.get(code, {})) for code, each in described.items()}


def language_of(text: str) -> Language:
    """The language that a question is written in: the one whose function words it has most of; English, if none has."""
    known = languages()
    if _KANA.search(text):
        return known["ja"]
    words = {without_accents(word.text) for word in words_of(normalised(text))}
    best = max(known.values(), key=lambda each: sum(map(each.is_function_word, words)))  # of equals, the first
    return known["zh"] if _HAN.search(text) and not any(map(best.is_function_word, words)) else best
