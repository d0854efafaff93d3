"""What a question says: its terms, sentence by sentence, and what it asks for.

A term is a stem with its weight, or a name or a number, which stand for nothing but themselves. A name is a word with a
capital letter inside of a sentence that has others without, or a first word that no everyday request has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import sentencex

from .language import LEAST_WEIGHT, Language
from .text import Word, is_number, normalised, words_of

POSSESSIVE: Final = "s"
NAME_WEIGHT: Final = 0.5  # at least, also of a number or a symbol
SHORTENED: Final = ("who", "when", "where", "why")  # kinds whose question words all say the same
MOST_CHARACTERS: Final = 20_000  # of a request that are read: its first and its last
_PLURAL: Final = re.compile(r"(?<=\w)\((?:s|es)\)")
_LINES: Final = re.compile(r"[\n\r]+")
_ABBREVIATED: Final = re.compile(r"(?<!\w)(?:[^\W\d_]|[A-Z][^\W\d_]{0,3})\.\s*$")  # F.C., Inc., Dr.


@dataclass(slots=True)
class Term:
    """A word of a sentence, as often as it occurs."""

    word: str  # as it is written, in lower case
    stem: str
    weight: float
    senses: frozenset[int]  # the lines of `Language.same` that have it
    is_name: bool
    is_exact: bool  # a number or a symbol
    is_function: bool  # a function word, which counts as a part of a phrase alone
    places: list[int] = field(default_factory=list)
    is_bound: bool = False  # by a hyphen
    is_common: bool = False  # several everyday requests have it, or it is a function word

    @property
    def key(self) -> str:
        return self.word if self.is_exact else self.stem


Sentence = dict[str, Term]  # by their keys


class Owned(NamedTuple):
    """The places of what belongs to something, and of that: brother and Anna, in Anna's brother or brother of Anna."""

    what: range
    owner: range


@dataclass(frozen=True, slots=True)
class Question:
    """See the module docstring."""

    text: str
    words: tuple[str, ...]  # in order: questions with equal ones are equal
    sentences: tuple[Sentence, ...]
    asks: str | None  # for "who", "when", ...; see the files of the languages
    asks_in: frozenset[int]  # the lines of `Language.same` that have the question word
    directed: tuple[tuple[str, str], ...]  # directing words with the stems of what follows them
    owned: tuple[tuple[Owned, ...], ...]  # of each sentence

    @property
    def terms(self) -> Sentence:
        """Of all sentences."""
        return {key: term for sentence in self.sentences for key, term in sentence.items()}


def same_words(text: str) -> tuple[str, ...]:
    """What makes two questions one: their words, numbers and symbols, in order."""
    return tuple(word.text for word in words_of(normalised(_shortened(text))))


def _shortened(text: str) -> str:
    """What is read of a text: all of it, or its beginning and its end."""
    if len(text) <= MOST_CHARACTERS:
        return text
    return f"{text[: MOST_CHARACTERS // 2]}\n{text[-MOST_CHARACTERS // 2 :]}"


def read(text: str, language: Language) -> Question:
    """What a text says if it is written in this language."""
    plain = normalised(_shortened(text))
    asks, asks_in, asked = _asked_for(_without_empty(plain, language), language)
    sentences = [words for part in _split(asked, language) if (words := language.words(part))]
    directed = [
        (first.text, language.stem(second.text))
        for words in sentences
        for first, second in pairwise(words)
        if first.text in language.directed
    ]
    return Question(
        text,
        tuple(word.text for word in words_of(plain)),
        tuple(_terms(words, language) for words in sentences),
        asks,
        asks_in,
        tuple(directed),
        tuple(tuple(_owned(words, language)) for words in sentences),
    )


def _owned(words: Sequence[Word], language: Language) -> Iterator[Owned]:
    """Runs of words that are no function words, on both sides of what says so.

    In "the cause of Anna's death" the cause is the death's. "A point in time of a film" says nothing of the point, and
    the city of Lima is Lima.
    """
    is_word = [not language.is_function_word(word.text) and word.text not in language.owning for word in words]

    def run(first: int, step: int) -> range:
        last = first
        while 0 <= last < len(words) and is_word[last]:
            last += step
        return range(first, last) if step > 0 else range(last + 1, first + 1)

    for at, word in enumerate(words):
        if word.text not in language.owning:
            continue
        if word.text == POSSESSIVE:
            yield Owned(run(at + 1, 1), run(at - 1, -1))
            continue
        after = at + 1
        while after < len(words) and language.is_function_word(words[after].text):
            after += 1
        what, owner = run(at - 1, -1), run(after, 1)
        if owner.stop < len(words) and words[owner.stop].text == POSSESSIVE:
            owner = run(owner.stop + 1, 1)
        is_thing = all(words[place].text not in language.kinds_of_names for place in what)
        if is_thing and (what.start == 0 or words[what.start - 1].text not in language.prepositions):
            yield Owned(what, owner)


def _without_empty(text: str, language: Language) -> str:
    """Without phrases that say nothing: the name of the author is the author, and instrument(s) an instrument."""
    text = _PLURAL.sub("", text)
    lowered = text.casefold()
    if len(lowered) != len(text):  # some capital letters have two small ones
        return text
    for match in reversed(list(language.empty.finditer(lowered))):
        text = text[: match.start()] + text[match.end() :]
    return text


def _split(text: str, language: Language) -> list[str]:
    """The sentences of a text. None ends with an initial or a short name if the next one begins with a small letter."""
    sentences = list[str]()
    for line in _LINES.split(text):
        for place, part in enumerate(sentencex.segment(language.code, line)):
            if place and part[:1].islower() and _ABBREVIATED.search(sentences[-1]):
                sentences[-1] += part
            else:
                sentences.append(part)
    return sentences


def _terms(words: Sequence[Word], language: Language) -> Sentence:
    stems = [language.stem(word.text) for word in words]
    senses = _senses(stems, language)
    has_case = any(not word.is_capital for word in words[1:])
    found: Sentence = {}
    for at, (word, stem) in enumerate(zip(words, stems, strict=True)):
        is_function = language.is_function_word(word.text)
        is_common = is_function or language.is_common(stem)
        is_first = at == 0 and len(words) > 1 and not is_function and _may_be_name(stem, words, language)
        in_word, in_phrase = senses[at]
        is_name = word.is_capital and has_case and (at > 0 or is_first) and word.text not in language.capital_words
        if language.capitalises_nouns:
            is_name = is_name and not in_word and not language.is_common(stem)
        begins_title = at == 0 and is_function and word.is_capital and has_case and _begins_name(words)
        if is_function and not is_name and not in_phrase and not begins_title:
            continue
        is_exact = is_number(word.text) or not any(map(str.isalnum, word.text))
        weight = LEAST_WEIGHT if is_function else language.weight(stem)
        if begins_title and not in_phrase:
            weight = 0.0  # as the first word of a sentence it may be no part of the name
        if is_name or is_exact:
            weight = max(weight, NAME_WEIGHT)
        senses_of = in_word | in_phrase
        term = Term(word.text, stem, weight, senses_of, is_name, is_exact, is_function and not is_name)
        term.is_common = is_common
        term = found.setdefault(term.key, term)
        term.senses |= senses_of
        term.is_name |= is_name
        term.is_bound |= word.is_bound
        term.places.append(at)
    return found


def _may_be_name(stem: str, words: Sequence[Word], language: Language) -> bool:
    """Whether the first word of a sentence is a name: Oslo, but not Determine; Lisa Bell, but not Player Bell."""
    if _begins_name(words):
        return stem not in language.people
    return not language.is_common(stem) and not language.related(stem)


def _begins_name(words: Sequence[Word]) -> bool:
    """Whether the first word of a sentence belongs to a name: another capital letter or a possessive s follows."""
    return len(words) > 1 and (words[1].is_capital or words[1].text == "s")


def _senses(stems: Sequence[str], language: Language) -> list[tuple[frozenset[int], frozenset[int]]]:
    """Of each word, as itself and as part of phrases."""
    alone = [language.same.get((stem,), frozenset()) for stem in stems]
    together = [frozenset[int]()] * len(stems)
    for length in range(2, language.longest_phrase + 1):
        for at in range(len(stems) - length + 1):
            if (found := language.same.get(tuple(stems[at : at + length]))) is not None:
                for place in range(at, at + length):
                    together[place] |= found
    return list(zip(alone, together, strict=True))


def _asked_for(text: str, language: Language) -> tuple[str | None, frozenset[int], str]:
    """What the first question word asks for, and the text with that word in its shortest form: when for what time.

    Of question words that begin at one place, the longest counts.
    """
    lowered = text.casefold()
    if len(lowered) != len(text):  # some capital letters have two small ones
        text = lowered
    lowered = language.politely.sub(lambda match: " " * len(match.group()), lowered)
    for match in language.asks.finditer(lowered):
        kind = language.kind_of(match.group())
        if kind != "whether" or _begins(text, match.start()):
            break
    else:
        return None, frozenset(), text
    start, end = match.span()
    word, asks_in = language.asking[kind]
    stems = language.stems(lowered[start:end])
    asks_in = asks_in.union(*(language.same.get(each, ()) for each in [tuple(stems), *((stem,) for stem in stems)]))
    if kind in SHORTENED:
        text = f"{text[:start]}{word}{text[end:]}"
    return kind, asks_in, text


def _begins(text: str, at: int) -> bool:
    """Whether a sentence begins here."""
    before = text[:at].rstrip()
    return not before or (before[-1] in ".!?,;:¿¡" and not _ABBREVIATED.search(before))
