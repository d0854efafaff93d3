"""Asking the served model whether two questions are one.

It reads an instruction with examples, which stays in its prefix cache, and the two questions, and says yes or no. The
logarithm of the odds of yes is what it thinks.

Nothing in a question can speak to it: a question is one quoted line, in which a chat template's marks are text, and one
that has the prompt's own words or more than `MOST_JUDGED` characters is not asked.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ..facts.language import ENGLISH, language_of
from ..facts.text import normalised, words_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT: Final = Path(__file__).parent / "prompt.toml"
MOST_JUDGED: Final = 300  # characters of a question
_OWN_WORDS: Final = re.compile(r"\bquestions? [12ab]\b|\bsame (answer|question)\b|\breply\b.*\b(yes|no)\b", re.I)
_QUOTES: Final = str.maketrans({'"': "'", "“": "'", "”": "'", "„": "'", "«": "'", "»": "'"})


class Pair(NamedTuple):
    """A stored question and a request."""

    stored: str
    asked: str

    @property
    def turned(self) -> Pair:
        return Pair(self.asked, self.stored)


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
