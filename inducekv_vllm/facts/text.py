"""The words of a question, as facts are found by them."""

import re
import unicodedata
from typing import Final, NamedTuple

_UNSPACED: Final = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"  # Chinese and Japanese put no spaces between words
_SCRIPTS: Final = re.compile(r"[\u30a0-\u30ff]+|[\u3040-\u309f]+|[\u3400-\u4dbf\u4e00-\u9fff]+")
_PART: Final = rf"(?:(?![{_UNSPACED}])\w)+"
_TOKEN: Final = re.compile(
    rf"(?<![\w.,])[-+]?\d+(?:[.,:/]\d+)*(?!(?![{_UNSPACED}])\w)"  # 500, -500, 2.1, 12:30, 24/7
    rf"|[{_UNSPACED}]+"
    rf"|{_PART}(?:['-]{_PART})*(?:\+\+|\#)?"  # Lyon, Guinea-Bissau, C++, C#
    r"|[^\w\s\x00-\x7f]+"  # an emoji is all of its code points
    r"|[^\w\s]"
)
_SPELLED_ALIKE: Final = str.maketrans("\u2019\u02bc\u2010\u2011\u2212", "''---")
_SAID: Final = frozenset("#%&@*/+=<>|^~$\\")  # symbols that belong to names and quantities
_BRACKETS: Final = frozenset("([{")  # where they stand at a word, as in f(x)
_ACCENTS: Final = re.compile(r"[\u0300-\u036f]")
_CONTRACTED: Final = re.compile(r"(?<=\w)'(?=\w)")


class Word(NamedTuple):
    """A word, a number, a symbol or an emoji."""

    text: str  # in lower case
    is_capital: bool  # its first letter


def normalised(text: str) -> str:
    """In the form NFKC, without characters that nobody sees: zero-width marks, soft hyphens, directions."""
    composed = unicodedata.normalize("NFKC", text)
    if not composed.isascii():
        composed = "".join(character for character in composed if unicodedata.category(character) != "Cf")
    return composed.translate(_SPELLED_ALIKE)


def without_accents(text: str) -> str:
    """Of Latin, Greek and Cyrillic letters; marks of Japanese make other letters, and stay."""
    if text.isascii():
        return text
    return unicodedata.normalize("NFC", _ACCENTS.sub("", unicodedata.normalize("NFD", text)))


def words_of(text: str) -> list[Word]:
    """The words, numbers, symbols and emoji of a normalised text, in order; punctuation is left out.

    Words joined by a hyphen are several. Of text without spaces, a word is a run of katakana or hiragana, or two
    Chinese characters that stand beside each other.
    """
    found = list[Word]()
    for match in _TOKEN.finditer(text):
        token = match.group()
        if _SCRIPTS.match(token):
            found += [Word(each, is_capital=False) for run in _SCRIPTS.findall(token) for each in _unspaced(run)]
        elif len(token) == 1 and not token.isalnum():
            at_word = token in _BRACKETS and match.start() > 0 and text[match.start() - 1].isalnum()
            if token in _SAID or at_word or unicodedata.category(token)[0] not in "PZC":
                found.append(Word(token, is_capital=False))
        elif token[0].isalnum() or token[0] == "_":
            found += _spaced(token)
        elif token[0] in "+-" or any(unicodedata.category(each)[0] != "P" for each in token):
            found.append(Word(token, is_capital=False))
    return found


def _spaced(token: str) -> list[Word]:
    capital, words = token[0].isupper(), list[Word]()
    for part in filter(None, token.split("-")):
        stem, *endings = _CONTRACTED.split(part)  # "what's" is what, s; "l'ufficio" is l, ufficio
        words.append(Word(stem.casefold(), capital))
        words += [Word(each.casefold(), each[0].isupper()) for each in endings]
    return words


def _unspaced(run: str) -> list[str]:
    """Two characters that stand beside each other, of Chinese characters; any other run is a word."""
    if "\u3040" <= run[0] <= "\u30ff":
        return [run]
    return [run[at : at + 2] for at in range(max(1, len(run) - 1))]


def is_number(word: str) -> bool:
    return word.lstrip("+-")[:1].isdigit()


def has_words(text: str) -> bool:
    """Whether a question can be found by its text."""
    return bool(words_of(normalised(text)))
