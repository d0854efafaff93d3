"""Asking the served model whether two questions are one.

It reads an instruction with examples, which stays in its prefix cache, and the two questions, and says yes or no. The
logarithm of the odds of yes is what it thinks; a pair is asked in both directions, and the smaller odds count. What a
model is worth as a judge is measured on pairs that the package has (`ABILITY`), and so is its threshold.

Nothing in a question can speak to it: a question is one quoted line, in which a chat template's marks are text, and one
that has the prompt's own words or more than `MOST_JUDGED` characters is not asked.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
import unicodedata
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from .language import ENGLISH, language_of
from .question import read
from .rule import compare
from .text import normalised, words_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT: Final = Path(__file__).parent / "judge.toml"
ABILITY: Final = Path(__file__).parent / "judge_pairs.jsonl"
MOST_JUDGED: Final = 300  # characters of a question
LEAST_AUROC: Final = 0.95
MOST_PASSED: Final = 0.01  # of the pairs that are two questions
ENOUGH: Final = 40  # pairs
HOPELESS: Final = 0.75  # AUROC of so many
LEAST_ODDS: Final = 0.0  # a threshold is not below it, whatever the pairs say
_OWN_WORDS: Final = re.compile(r"\bquestions? [12ab]\b|\bsame (answer|question)\b|\breply\b.*\b(yes|no)\b", re.I)
_QUOTES: Final = str.maketrans({'"': "'", "“": "'", "”": "'", "„": "'", "«": "'", "»": "'"})


class Pair(NamedTuple):
    """A stored question and a request."""

    stored: str
    asked: str


class Ability(NamedTuple):
    """What a model is worth as a judge."""

    auroc: float  # that it ranks a pair of one question above one of two
    threshold: float  # with which at most `MOST_PASSED` of the others pass
    found: float  # share of the pairs of one question that pass then
    passed: float  # share of the others

    @property
    def is_able(self) -> bool:
        return self.auroc >= LEAST_AUROC and self.found > 0


class JudgePrompt:
    """A model's prompts, in its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._described = tomllib.loads(PROMPT.read_text(encoding="utf-8"))
        self._heads: dict[str, list[int]] = {}
        self.yes, self.no = (self._tokens(" " + self._described[each])[0] for each in ("yes", "no"))

    def token_ids(self, pair: Pair) -> list[int]:
        """Of the question whether the second asks what the first asks. Both can be asked (`can_be_asked`)."""
        code = language_of(pair.stored).code
        if code not in self._heads:
            self._heads[code] = self._tokens(self._head(code))
        return [*self._heads[code], *self._tokens(self._form(pair))]

    def fits(self, context: int | None) -> bool:
        """Whether a context of so many tokens has room for any pair; None: enough."""
        most = len(self.token_ids(Pair("?", "?"))) + 2 * MOST_JUDGED  # a question's characters are no more tokens
        return context is None or most < context

    def _head(self, code: str) -> str:
        examples = self._described["examples"].get(code) or self._described["examples"]["en"]
        shown = "".join(f"{self._form(Pair(stored, asked))} {says}\n\n" for stored, asked, says in examples)
        return f"{self._described['instruction']}\n\n{shown}"

    def _form(self, pair: Pair) -> str:
        return str(self._described["form"]).format(one_line(pair.stored), one_line(pair.asked))

    def _tokens(self, text: str) -> list[int]:
        """A chat template's marks in a text are text."""
        return list(self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])


def one_line(text: str) -> str:
    """A text as it is quoted: in one line, without marks of quotation or characters that nobody sees."""
    seen = "".join(" " if unicodedata.category(each)[0] in "CZ" else each for each in text)
    return " ".join(seen.translate(_QUOTES).split())


def can_be_asked(text: str) -> bool:
    """Whether a question is short enough, says nothing that the prompt says itself, and is English.

    In no other language it is measured what a model is worth as a judge.
    """
    language = language_of(text)
    is_english = language.code == ENGLISH and (text.isascii() or any(map(language.is_function_word, _words(text))))
    return len(text) <= MOST_JUDGED and _OWN_WORDS.search(one_line(text)) is None and is_english


def _words(text: str) -> list[str]:
    return [word.text for word in words_of(normalised(text))]


def log_odds(yes: float, no: float) -> float:
    """Of log-probabilities."""
    return min(max(yes - no, -99.0), 99.0)


class KnownPair(NamedTuple):
    """What a model is measured on."""

    pair: Pair
    is_same: bool
    is_open: bool  # words leave it open, so that a judge decides


@cache
def known_pairs() -> tuple[KnownPair, ...]:
    rows = map(json.loads, ABILITY.read_text(encoding="utf-8").splitlines())
    return tuple(_known(Pair(row["question"], row["asked"]), bool(row["same"])) for row in rows)


def _known(pair: Pair, is_same: bool) -> KnownPair:
    language = language_of(pair.stored)
    compared = compare(read(pair.stored, language), read(pair.asked, language), language)
    return KnownPair(pair, is_same, not compared.is_same and compared.differs is None)


def auroc(odds: Sequence[float]) -> float:
    """That a pair of one question ranks above one of two, among the first of `known_pairs`."""
    same, other = _apart(odds)
    ranked = sum((one > two) + 0.5 * (one == two) for one in same for two in other)
    return ranked / (len(same) * len(other))


def is_hopeless(odds: Sequence[float]) -> bool:
    """Whether the first of `known_pairs` tell already that a model is not able."""
    return len(odds) >= ENOUGH and auroc(odds) < HOPELESS


def ability(odds: Sequence[float]) -> Ability:
    """From the odds of `known_pairs`, in their order; of the first of them, if these are enough."""
    known = list(zip(odds, known_pairs(), strict=False))
    passing = sorted((each for each, pair in known if pair.is_open and not pair.is_same), reverse=True)
    highest = passing[int(MOST_PASSED * len(_apart(odds)[1]))]
    threshold = max(math.nextafter(highest, math.inf), LEAST_ODDS)
    return Ability(auroc(odds), threshold, *prices(odds, threshold))


def _apart(odds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Those of pairs of one question, and of two."""
    known = list(zip(odds, known_pairs(), strict=False))
    return [each for each, pair in known if pair.is_same], [each for each, pair in known if not pair.is_same]


def prices(odds: Sequence[float], threshold: float) -> tuple[float, float]:
    """The shares of the known pairs of one question, and of two, that are answered with a threshold."""
    passed = [pair for each, pair in zip(odds, known_pairs(), strict=False) if pair.is_open and each >= threshold]
    same, other = map(len, _apart(odds))
    found = sum(pair.is_same for pair in passed)
    return found / same, (len(passed) - found) / other
