"""What a question says: what makes two wordings one question, and the words that tell it from others."""

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from .language import Language
from .text import Word, is_number, normalised, words_of

NAME_WEIGHT: Final = 0.5  # at least, also of a number or a symbol
FEWEST: Final = 2  # words of "what is" and a name: a word alone may ask anything
MOST_CHARACTERS: Final = 20_000  # of a request that are read: its first and its last
_QUOTED: Final = re.compile(r"[\"“”„«»‘`]([^\"“”„«»’`\n]{1,100})[\"“”„«»’`]")
_BETWEEN: Final = frozenset("/\\|*~^<>=@([{")  # symbols that only stand between words
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
    kinds: frozenset[int]  # of what it asks for: a person, a place
    conditions: frozenset[str]  # words that begin one; at its beginning they may as well say "whether"
    is_negated: bool
    asks_for: str | None  # "subject" or "object": who hired Tom, whom did Tom hire; None: neither, or it cannot be told
    quoted: frozenset[str]  # in lower case


def same_words(text: str) -> Key:
    """A text's words, numbers and symbols, in order."""
    return tuple(word.text for word in words_of(normalised(_shortened(text))))


def key_of(text: str, language: Language) -> Key:
    """What makes two wordings one question in a language.

    They may differ in case, punctuation, accents, articles, politeness, contractions, spelling variants and plurals,
    in the places of auxiliary verbs, and in the "what is" that asks for something that they name.
    """
    return _key(words_of(language.plain(normalised(_shortened(text)))), language)


def _key(words: list[Word], language: Language) -> Key:
    last = len(words) - 1
    kept = [
        word.text
        for at, word in enumerate(words)
        if word.text not in language.ignored or (word.text == "a" and at and (word.is_capital or at == last))  # plan A
    ]
    moving = sorted(word for word in kept if word in language.moving)
    others = [word for word in kept if word not in language.moving]
    if len(others) > FEWEST and moving and (others[0], *moving) in language.naming:
        others, moving = others[1:], []
    return (*others, "", *moving)


def needs_context(question: Question, text: str, language: Language) -> bool:
    """Whether a question stands on the turns before it: "And for Lyon?", "How old is he?", "Why?"."""
    plain = language.plain(normalised(_shortened(text)))
    words = [word.text for word in words_of(plain)]
    is_named = any(term.is_name or term.is_exact for term in question.terms.values())
    if not words or words[0] in language.leading or language.follows(plain):
        return True
    if not question.terms:
        return not language.addressing & set(words)
    refers = not is_named and len(question.terms) < 3 and language.said(language.personal, plain)
    return bool(refers) or (not is_named and len(question.terms) < 2 and bool(language.said(language.referring, plain)))


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
        _terms(language.words(plain), language),
        language.said(language.telling, plain),
        frozenset(number for number, listed in enumerate(language.tenses) if language.said(listed, plain)),
        frozenset(number for number, listed in enumerate(language.kinds) if language.said(listed, plain)),
        language.conditions & {word.text for word in words[1:]},
        len(language.said(language.negating, plain)) % 2 == 1,
        _asks_for(words, language),
        frozenset(match.casefold() for match in _QUOTED.findall(written)),
    )


def _asks_for(words: list[Word], language: Language) -> str | None:
    """By the auxiliary verb that a question for the object needs, and one for the subject does not have."""
    said = [word.text for word in words]
    if not said or said[0] not in language.asking:
        return None
    first = next((word for word in said if word in language.moving), None)
    if first is None:
        return "subject"
    return "object" if first in language.supporting and first in said[1:4] else None


def _terms(words: list[Word], language: Language) -> dict[str, Term]:
    has_case = any(word.text.isalpha() and not word.is_capital for word in words[1:])
    found: dict[str, Term] = {}
    for at, word in enumerate(words):
        stem = language.stem(word.text)
        is_function, is_common = language.is_function_word(word.text), language.is_common(stem)
        is_name = word.is_capital and has_case and not (language.capitalises_nouns and is_common)
        if is_function:  # an Each Other of a title, but not what a sentence begins with
            follows = at + 1 < len(words) and words[at + 1].is_capital and len(words[at + 1].text) > 1
            is_name = is_name and at > 0 and follows and word.text not in language.ignored
        elif at == 0:
            is_name = is_name and not is_common
        if (is_function and not is_name) or word.text in _BETWEEN:
            continue
        is_exact = is_number(word.text) or not any(map(str.isalnum, word.text))
        weight = language.weight(stem)
        term = Term(word.text, stem, max(weight, NAME_WEIGHT) if is_name or is_exact else weight, is_name, is_exact)
        if (known := found.get(term.key)) is None or (is_name and not known.is_name):
            found[term.key] = term
    return found
