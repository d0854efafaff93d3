"""The lists that the gate is measured with, and a task's question in other words, which no training data has.

Templates and rewordings are in `lists.toml`; a slot, like "{ref}", is carried over as it is.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent
FLAT: Final = (
    "wrappers",
    "systems",
    "sentences",
    "everyday",
    "everyday_picture",
    "languages",
    "lorem",
    "nonsense",
)


@dataclass(frozen=True)
class Lists:
    """Texts of no training data. `wrappers` have the place "{question}"; `turns` are (user, assistant)."""

    wrappers: tuple[str, ...]
    systems: tuple[str, ...]
    turns: tuple[tuple[str, str], ...]
    sentences: tuple[str, ...]
    everyday: tuple[str, ...]
    everyday_picture: tuple[str, ...]
    languages: tuple[str, ...]
    lorem: tuple[str, ...]
    nonsense: tuple[str, ...]
    near_misses: Mapping[str, Mapping[str, tuple[str, ...]]]  # stream to task to questions that are not the task's
    rewordings: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]  # task to its templates and to other wordings


@functools.cache
def read_lists() -> Lists:
    found, near_misses = _read("lists.toml"), _read("near_misses.toml")
    return Lists(
        **{name: tuple(found[name]) for name in FLAT},
        turns=tuple((turn["user"], turn["assistant"]) for turn in found["turns"]),
        near_misses={
            stream: {task: tuple(questions) for task, questions in tasks.items()}
            for stream, tasks in near_misses.items()
        },
        rewordings={task: (tuple(r["asked"]), tuple(r["wordings"])) for task, r in found["rewordings"].items()},
    )


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / name).read_text(encoding="utf-8"))


_FUNCTION_WORDS: Final = """
about after again all also and another answer any are been before being below beside between both can could did does
each every find for from get give had has have having her here him his how into its itself just know like look may
more most much name named need not now object objects off one only other our out over own per picture please put same
see she some such take tell than that the their them then there these they thing things this those too two under until
use very want was were what when where whether which while who whom whose why will with word words would yes you your
"""
SHARED_QUESTIONS: Final = {
    "code_shape": "code",
    "code_digit": "code",
    "sign_shape": "sign",
    "sign_digit": "sign",
}
LEAST_SHARE: Final = 0.1  # of the training questions: rarer words belong to single questions
LEAST_LETTERS: Final = 3  # as in "box"
_SLOT: Final = re.compile(r"\{(\w+)\}")
_WORD: Final = re.compile(r"[^\W\d_]+")
_ENDING: Final = re.compile(r"\bAnswer (with|yes|no|in|briefly)\b[^.]*\.")
_STOP_WORDS: Final = frozenset(_FUNCTION_WORDS.split())


def reworded(task: str, question: str, number: int) -> str | None:
    """Rewording `number % count` of the task's question; None: this is no question of the task."""
    name = listed_name(task)
    found = _parse(name, question)
    if found is None:
        return None
    wordings = read_lists().rewordings[name][1]
    text = wordings[number % len(wordings)].format_map(found.groupdict())
    return text[0].upper() + text[1:]


def shares_content_word(task: str, question: str, training: Collection[str]) -> bool:
    """Whether the question has a content word that at least a tenth of the training questions have outside slots."""
    name = listed_name(task)
    counts = Counter(word for asked in training for word in _fixed_words(name, asked))
    least = max(1.0, LEAST_SHARE * len(training))
    return any(counts[word] >= least for word in _content_words(question))


def listed_name(task: str) -> str:
    """Under which name the lists hold the task."""
    return SHARED_QUESTIONS.get(task, task)


@functools.cache
def _patterns(name: str) -> tuple[re.Pattern[str], ...]:
    return tuple(_pattern(template) for template in read_lists().rewordings[name][0])


def _pattern(template: str) -> re.Pattern[str]:
    """The template as an expression with one named group a slot."""
    parts = _SLOT.split(template)  # texts and, between them, the names of slots
    return re.compile("".join(f"(?P<{p}>.+?)" if at % 2 else re.escape(p) for at, p in enumerate(parts)))


def _parse(name: str, question: str) -> re.Match[str] | None:
    return next((found for pattern in _patterns(name) if (found := pattern.fullmatch(question))), None)


@functools.lru_cache(maxsize=65536)  # training questions are asked about once for every question
def _fixed_words(name: str, question: str) -> frozenset[str]:
    """The content words outside the slots, or all of them where the question is none of the task."""
    found = _parse(name, question)
    if found is None:
        return _content_words(question)
    spans = sorted(found.span(slot) for slot in found.groupdict())
    starts, ends = [0, *(end for _, end in spans)], [*(start for start, _ in spans), len(question)]
    return _content_words(" ".join(question[start:end] for start, end in zip(starts, ends, strict=True)))


def _content_words(text: str) -> frozenset[str]:
    """Words of enough letters that say what is asked; how to answer ("Answer with ...") does not count."""
    words = _WORD.findall(_ENDING.sub("", text).lower())
    return frozenset(word for word in words if len(word) >= LEAST_LETTERS and word not in _STOP_WORDS)
