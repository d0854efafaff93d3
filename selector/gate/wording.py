"""Which words of a task's questions tell them from everything else, and questions made of that.

Another wording of a question keeps the word that tells it best, its key. What looks like the question and is another
has other words in that place, or has the key and none of the rest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

_PIECE: Final = re.compile(r"\w+|\W+")
_SENTENCE: Final = re.compile(r"[^.?!]+[.?!]*\s*")
SHARED: Final = 0.2  # of a task's questions have a word of its frame
TELLING: Final = 100.0  # times as frequent in the task's questions as elsewhere
REPEATED: Final = 0.03  # of a task's questions have a subject, at least
OFTEN: Final = 0.5  # and at most
SHORTEST: Final = 3  # letters


@dataclass(frozen=True)
class Wording:
    """The words of a task's questions."""

    frame: frozenset[str]  # that many of them have
    telling: Mapping[str, float]  # of these, the ones that are rare elsewhere, and how many times as frequent they are
    subjects: frozenset[str]  # of which questions have one or another: the task asks about few things, again and again
    ending: str  # the sentence that says how to answer, which most of the questions end with; empty if there is none

    def key(self, text: str) -> str | None:
        """The word of the question that tells it best."""
        present = [word for word in _words(text) if word in self.telling]
        return max(present, key=lambda word: (self.telling[word], word), default=None)


def wordings(questions: Mapping[str, Sequence[str]], others: Sequence[str]) -> dict[str, Wording]:
    """By task; `others` are questions of no task."""
    elsewhere = Counter(word for text in others for word in set(_words(text)))
    found = {}
    for task, own in questions.items():
        ending = _ending(own)
        counts = Counter(word for text in own for word in set(_words(text)))
        frame = {word: n / len(own) for word, n in counts.items() if n >= SHARED * len(own)}
        ratios = {word: n / len(own) * len(others) / (elsewhere[word] + 1) for word, n in counts.items()}
        formats = set(_words(ending)) if ending and any(ending in text for text in others) else set()
        found[task] = Wording(
            frame=frozenset(frame),
            telling={
                word: ratio
                for word, ratio in ratios.items()
                if word in frame and ratio >= TELLING and len(word) >= SHORTEST and word not in formats
            },
            subjects=frozenset(
                word
                for word, n in counts.items()
                if word not in formats and len(word) >= SHORTEST and REPEATED * len(own) <= n < OFTEN * len(own)
            ),
            ending=ending,
        )
    return found


def other_wording(text: str, wording: Wording, fillers: Sequence[str], rng: Random) -> str | None:
    """The question in another frame: its key and what is its own alone stay; None if it has no key."""
    key = wording.key(text)
    if key is None:
        return None
    sentences = [sentence.strip() for sentence in _SENTENCE.findall(text)]
    if wording.ending and key not in _words(wording.ending) and rng.random() < 0.5:
        sentences = [sentence for sentence in sentences if sentence != wording.ending] or sentences
    rng.shuffle(sentences)
    pieces: list[str] = []
    for sentence in sentences:
        parts = _PIECE.findall(sentence)
        if rng.random() < 0.3:
            at = rng.randrange(len(parts))
            parts = [*parts[at:], " ", *parts[:at]]
        for piece in parts:
            word = piece.lower()
            if word == key or word not in wording.frame or rng.random() < 0.4:
                pieces.append(piece)
            elif rng.random() < 0.7:
                pieces += [rng.choice(fillers), *([" ", rng.choice(fillers)] if rng.random() < 0.3 else [])]
        pieces.append(" ")
    return _tidy("".join(pieces))


def another_question(text: str, wording: Wording, words: Sequence[str], rng: Random) -> str | None:
    """The question with another word in the place of its key; None if it has no key."""
    key = wording.key(text)
    if key is None:
        return None
    replaced = {word: rng.choice(words) for word in wording.telling if word == key or rng.random() < 0.3}
    return "".join(replaced.get(piece.lower(), piece) for piece in _PIECE.findall(text))


def another_subject(text: str, wording: Wording, words: Sequence[str], rng: Random) -> str | None:
    """The question about something that the task never asks about; None if its subject is not one of few."""
    key = wording.key(text)
    subjects = {word for word in _words(text) if word in wording.subjects and word != key}
    if key is None or not subjects:
        return None
    replaced = {word: rng.choice(words) for word in subjects}
    replaced |= {word: rng.choice(words) for word in wording.frame if word != key and rng.random() < 0.3}
    return "".join(replaced.get(piece.lower(), piece) for piece in _PIECE.findall(text))


def mentioning(text: str, wording: Wording, rng: Random) -> str:
    """Another question with a word that tells the task's in the place of one of its own."""
    words = text.split()
    key = rng.choices(list(wording.telling), list(wording.telling.values()))[0]
    words[rng.randrange(len(words))] = key
    return " ".join(words)


def _ending(questions: Sequence[str]) -> str:
    endings = Counter(
        _SENTENCE.findall(text.strip())[-1].strip() for text in questions if len(_SENTENCE.findall(text)) > 1
    )
    ending, count = endings.most_common(1)[0] if endings else ("", 0)
    return ending if count > len(questions) / 2 else ""


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _tidy(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
