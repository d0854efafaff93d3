"""What a question says: what makes two wordings one question, and the words that tell it from others."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from .language import Language
from .text import Word, is_number, normalised, words_of

NAME_WEIGHT: Final = 0.5  # at least, also of a number or a symbol
MOST_CHARACTERS: Final = 20_000  # of a request that are read: its first and its last
_QUOTED: Final = re.compile(r"[\"“”„«»‘`]([^\"“”„«»’`\n]{1,100})[\"“”„«»’`]")
_BETWEEN: Final = frozenset("/\\|*~^<>=@")  # symbols that only stand between words
Key = tuple[str, ...]


class Term(NamedTuple):
    """A word that is no function word."""

    word: str  # as it is written, in lower case
    stem: str
    weight: float
    is_name: bool
    is_exact: bool  # a number or a symbol

    @property
    def key(self) -> str:
        return self.word if self.is_exact else self.stem


@dataclass(frozen=True, slots=True)
class Question:
    """See the module docstring."""

    key: Key  # equal for wordings of one question, whatever else there is
    terms: dict[str, Term]  # by their keys
    telling: frozenset[str]  # words that make another question: when, only, before
    tenses: frozenset[int]  # those that it has
    is_negated: bool
    quoted: frozenset[str]  # in lower case


def same_words(text: str) -> Key:
    """A text's words, numbers and symbols, in order."""
    return tuple(word.text for word in words_of(normalised(_shortened(text))))


def key_of(text: str, language: Language) -> Key:
    """What makes two wordings one question in a language.

    They may differ in case, punctuation, accents, articles, politeness, contractions, spelling variants and plurals,
    and in the places of auxiliary verbs.
    """
    return _key(words_of(language.plain(normalised(_shortened(text)))), language)


def _key(words: list[Word], language: Language) -> Key:
    kept = [word.text for word in words if word.text not in language.ignored]
    moving = sorted(word for word in kept if word in language.moving)
    return (*(word for word in kept if word not in language.moving), "", *moving)


def _shortened(text: str) -> str:
    """What is read of a text: all of it, or its beginning and its end."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[: MOST_CHARACTERS // 2]}\n{text[-MOST_CHARACTERS // 2 :]}"


def read(text: str, language: Language) -> Question:
    """What a text says if it is written in this language."""
    written = normalised(_shortened(text))
    plain = language.plain(written)
    words = words_of(plain)
    return Question(
        _key(words, language),
        _terms(words, plain, language),
        language.said(language.telling, plain),
        frozenset(number for number, words in enumerate(language.tenses) if language.said(words, plain)),
        len(language.said(language.negating, plain)) % 2 == 1,
        frozenset(match.casefold() for match in _QUOTED.findall(written)),
    )


def _terms(words: list[Word], plain: str, language: Language) -> dict[str, Term]:
    has_case = any(word.text.isalpha() and not word.is_capital for word in words[1:])
    first = words[0].text if words else None
    found: dict[str, Term] = {}
    for word in language.content(plain):
        stem = language.stem(word.text)
        is_exact = is_number(word.text) or not any(map(str.isalnum, word.text))
        if word.text in _BETWEEN:
            continue
        is_name = word.is_capital and has_case and not (language.capitalises_nouns and language.is_common(stem))
        if word.text == first:  # a capital letter says nothing there
            is_name = is_name and not language.is_common(stem)
        weight = language.weight(stem)
        term = Term(word.text, stem, max(weight, NAME_WEIGHT) if is_name or is_exact else weight, is_name, is_exact)
        if (known := found.get(term.key)) is None or (is_name and not known.is_name):
            found[term.key] = term
    return found
