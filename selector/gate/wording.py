"""Which words of a task's questions tell them from everything else, and questions made of that.

Another wording of a question keeps one of the words that tell it, its key. What looks like the question and is another
has other words in the place of all of them, or has one of them and none of the rest.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

_PIECE: Final = re.compile(r"\w+|\W+")
_SENTENCE: Final = re.compile(r"[^.?!]+[.?!]*\s*")
SHARED: Final = 0.2  # of a task's questions have a word of its frame
TELLING: Final = 50.0  # times as frequent in the task's questions as elsewhere
SHORTEST: Final = 3  # letters
OF_FORM: Final = 0.5  # of a question's words, on the average: more are those of most questions of the task


@dataclass(frozen=True)
class Wording:
    """The words of a task's questions."""

    frame: frozenset[str]  # that many of them have
    telling: Mapping[str, float]  # of these, the ones that are rare elsewhere, and how many times as frequent they are
    ending: str  # the sentence that says how to answer, which most of the questions end with; empty if there is none

    def key(self, text: str, rng: Random) -> str | None:
        """One of the words that tell the question, the better it tells it the likelier; None if it has none."""
        present = [word for word in _words(text) if word in self.telling]
        return rng.choices(present, [self.telling[word] for word in present])[0] if present else None


def in_one_form(texts: Sequence[str]) -> bool:
    """Whether a task's questions are one form with places to fill, rather than people's own words."""
    words = [found for text in texts if (found := set(_words(text)))]
    counts = Counter(word for each in words for word in each)
    usual = {word for word, count in counts.items() if count > len(words) / 2}
    return len(words) > 1 and sum(len(each & usual) / len(each) for each in words) > OF_FORM * len(words)


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
                for word, ratio in sorted(ratios.items())  # a set's order is another in every process
                if word in frame and ratio >= TELLING and len(word) >= SHORTEST and word not in formats
            },
            ending=ending,
        )
    return found


def other_wording(text: str, wording: Wording, fillers: Sequence[str], rng: Random) -> str | None:
    """The question in another frame: its key and what is its own alone stay; None if it has no key."""
    key = wording.key(text, rng)
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
    """The question with other words in the place of those that tell it; None if it has none."""
    told = {word: rng.choice(words) for word in _words(text) if word in wording.telling}
    return "".join(told.get(piece.lower(), piece) for piece in _PIECE.findall(text)) if told else None


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
