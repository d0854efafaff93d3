"""The questions about a piece of a document: what the model asks itself, and what is made of the sentences.

A small model asks badly. Sentences with a word left out, and sentences to be continued, need nobody who asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import Final, Literal

from .chunks import sentences_of

Kind = Literal["question", "use", "summary", "cloze", "continuation"]
ASKED: Final[Mapping[Kind, str]] = MappingProxyType(
    {
        "question": "Write one short question that the text above answers. Write the question alone.",
        "use": "Write one question of somebody who wants to use what the text above says. Write the question alone.",
    }
)
# What is shown before, as a turn of its own: without it a small model answers in place of asking.
SHOWN_TEXT: Final = "The ferry to Tarn leaves at 7:40 from the north quay. Bicycles cost two crowns."
SHOWN: Final[Mapping[Kind, str]] = MappingProxyType(
    {
        "question": "From which quay does the ferry to Tarn leave?",
        "use": "I want to take my bicycle to Tarn. What do I have to pay for it?",
    }
)
BLANK: Final = "____"
WORDS: Final = 6  # of a sentence, at least, that a question is made of
FOLLOWING: Final = 3  # sentences that a continuation has
BEGINNING: Final = (0.2, 0.5)  # of a sentence's words, which stand in the question
EXACT: Final = re.compile(r"(?<![\w.])(?:\d[\w.,:/-]*\w|\d|\w+[_.:/-]\w[\w_.:/-]*\w|\w*\d\w*|[A-Z]{2,})(?!\w)")
NAME: Final = re.compile(r"(?<=[a-z,;] )[A-Z][\w-]+(?: [A-Z][\w-]+)*")
LONG: Final = re.compile(r"\b[^\W\d_]{6,}\b")


@dataclass(frozen=True)
class MadeQuestion:
    kind: Kind
    text: str
    answer: str
    missing: str = ""  # the word that a cloze leaves out
    exact: bool = False  # whether that is a number, a name or a code


def asking(kind: Kind, text: str) -> str:
    """The request for a question about a text."""
    return f"{text}\n\n{ASKED[kind]}"


def question_in(said: str) -> str | None:
    """The first question in what the model said; None if there is none."""
    found = re.match(r"\s*(?:Question:\s*)?([^\n?]{12,300}\?)", said)
    return found[1] if found else None


def summaries(chunk: str, title: str) -> list[MadeQuestion]:
    """The model writes the answer."""
    first = sentences_of(chunk)[:1]
    start = " ".join(first[0].split()[:8]) if first else ""
    return [MadeQuestion("summary", f'What does "{title}" say in the part that begins with "{start}"?', "")]


def clozes(chunk: str, title: str, count: int, rng: Random) -> list[MadeQuestion]:
    """Sentences without one of their words: an exact value if they have one, else a name, else a long word.

    The answer is the whole sentence, which is how models answer.
    """
    made = list[MadeQuestion]()
    for sentence in _sentences(chunk, rng):
        if len(made) == count:
            break
        for pattern in (EXACT, NAME, LONG):
            if found := list(pattern.finditer(sentence)):
                word = rng.choice(found)
                text = f"{sentence[: word.start()]}{BLANK}{sentence[word.end() :]}"
                asked = f'Write this sentence of "{title}" and fill in the blank: {text}'
                made.append(MadeQuestion("cloze", asked, sentence, word[0], exact=pattern is not LONG))
                break
    return made


def continuations(chunk: str, title: str, count: int, rng: Random) -> list[MadeQuestion]:
    """Sentences of which the beginning is given, each with those after it."""
    sentences, made = sentences_of(chunk), []
    places = [at for at, sentence in enumerate(sentences) if len(sentence.split()) >= WORDS]
    for at in rng.sample(places, min(count, len(places))):
        words = sentences[at].split()
        cut = max(3, round(rng.uniform(*BEGINNING) * len(words)))
        rest = " ".join([*words[cut:], *sentences[at + 1 : at + FOLLOWING]])
        asked = f'Continue this sentence of "{title}": {" ".join(words[:cut])}'
        made.append(MadeQuestion("continuation", asked, rest))
    return made


def _sentences(chunk: str, rng: Random) -> list[str]:
    found = [sentence for sentence in sentences_of(chunk) if len(sentence.split()) >= WORDS]
    return rng.sample(found, len(found))
