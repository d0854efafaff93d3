"""The questions that a gate is fitted to: those of each task as people ask them, and everything else.

A fifth of all, with phrases of their own, is held out: thresholds are set on what the fit has not seen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, Literal

from inducekv_vllm.backbone.turns import message

from ..data.examples import Example
from .background import Phrases, Request, everyday_requests, phrases
from .data import GateData
from .variations import LONG, OTHERS, STYLES, Messages, Vary, plain, text_of, with_text, wrapped
from .wording import another_question, mentioning, other_wording, wordings

FOLDS: Final = 5  # one of them is held out
OWN: Final = 64  # examples of a task; each is asked in several ways
TEXTS: Final = 256  # examples of a task for classifiers
BASE: Final = 256  # base questions, at most
BACKGROUND: Final = 1000  # of the user's, at most
REQUESTS: Final = 1500  # everyday requests
REWORDED: Final = 3  # of each example
NEAR_MISSES: Final = 32  # of each task and kind
NOISE: Final = 96
WRAPPED: Final = 6  # of so many everyday requests, one has a phrase around it, too
GIVEN: Final = "given near-miss"
Part = Literal["fit", "held_out"]


@dataclass(frozen=True)
class GateQuestion:
    """A prompt and the task that it belongs to."""

    messages: Messages
    images: tuple[Path, ...]
    task: str | None  # None: no task
    kind: str
    part: Part
    style: str | None = None  # in which its pictures are shown
    fold: int = 0  # of `FOLDS`: all that is asked in the words of one example has its fold


def fitting_set(data: GateData, *, pictures: bool, for_classifiers: bool = False, seed: int) -> list[GateQuestion]:
    """Questions of C tasks and of none, in a fixed order.

    Args:
        pictures: whether the model takes pictures.
        for_classifiers: they see text alone.
    """
    made = _FittingSet(data, pictures, TEXTS if for_classifiers else OWN, Random(f"gate {seed}"))
    questions = made.texts() if for_classifiers else made.questions()
    return [*questions, *made.given_near_misses(data.near_misses)]


class _FittingSet:
    def __init__(self, data: GateData, pictures: bool, most: int, rng: Random) -> None:
        """`most` examples of a task."""
        self._rng = rng
        self._own = {task: self._some(examples, most) for task, examples in data.own.items()}
        self._base = self._some(data.base, BASE)
        self._background = self._some(data.background, BACKGROUND)
        self._phrases = _parts(phrases())
        self._texts = {task: [text_of(e.messages) for e in examples] for task, examples in self._own.items()}
        self._asked_texts = {text_of(e.messages).casefold() for examples in data.own.values() for e in examples}
        self._requests = [
            request
            for request in everyday_requests()
            if (pictures or not request.picture) and request.text.casefold() not in self._asked_texts
        ][:REQUESTS]
        self._english = [r.text for r in self._requests if r.language == "en"]
        # As frequent as they are, so mostly function words; and each once, so mostly nouns.
        self._fillers = [word for text in self._english for word in text.lower().split() if word.isalpha()]
        self._words = sorted(set(self._fillers))
        others = [text_of(example.messages) for example in (*self._base, *self._background)]
        self._wordings = wordings(self._texts, [*others, *(r.text for r in self._requests)])
        # Pictures to send along with everyday requests.
        self._pictured = [e for examples in (*self._own.values(), self._base) for e in examples if e.images]
        self._pictured = self._pictured if pictures else []

    def questions(self) -> Iterator[GateQuestion]:
        for task, examples in self._own.items():
            for number in range(OWN):  # the fewer examples, the more often is each asked: all tasks count alike
                yield from self._asked(examples[number % len(examples)], task, number % len(examples))
        for number, example in enumerate(self._base):
            yield from self._asked(example, None, number)
        yield from self._given_requests()
        for number, request in enumerate(self._requests):
            yield self._everyday(request, number)
        for task in self._own:
            yield from self._near_misses(task)
        yield from self._noise()

    def _given_requests(self) -> Iterator[GateQuestion]:
        for number, example in enumerate(self._background):
            yield GateQuestion(example.messages, example.images, None, "background", _part(number), fold=number % FOLDS)

    def _asked(self, example: Example, task: str | None, number: int) -> Iterator[GateQuestion]:
        """One example as it stands, wrapped, in two other ways, and in other words."""
        part, fold = _part(number), number % FOLDS
        rng, known = self._rng, self._phrases[part]
        ways: list[tuple[str, Vary]] = [("plain", plain), ("wrapped", wrapped)]
        ways += [("other", rng.choice(LONG if rng.random() < 0.05 else OTHERS)) for _ in range(2)]
        for kind, vary in ways:
            style = rng.choice(list(STYLES)) if example.images and kind != "plain" and rng.random() < 0.5 else None
            yield GateQuestion(vary(example.messages, known, rng), example.images, task, kind, part, style, fold)
        if task is None:
            return
        for _ in range(REWORDED):
            text = other_wording(text_of(example.messages), self._wordings[task], self._fillers, rng)
            if text is not None:
                yield GateQuestion(with_text(example.messages, text), example.images, task, "reworded", part, fold=fold)

    def _everyday(self, request: Request, number: int) -> GateQuestion:
        text = request.text
        if self._rng.random() < 0.25:
            text = self._rng.choice(self._phrases[_part(number)].wrappers).replace("{question}", text)
        return self._of_no_task(text, "everyday", number, pictured=request.picture or self._rng.random() < 0.5)

    def _near_misses(self, task: str) -> Iterator[GateQuestion]:
        """Other questions in the task's answer format, and its questions without what tells them."""
        rng, texts, wording = self._rng, self._texts[task], self._wordings[task]
        for number in range(NEAR_MISSES):
            found = [another_question(rng.choice(texts), wording, self._words, rng) for _ in range(2)]
            if wording.ending and wording.key(wording.ending, rng) is None:
                found.append(f"{rng.choice(self._english)} {wording.ending}")
            if wording.telling:
                found.append(mentioning(rng.choice(self._english), wording, rng))
            for text in found:
                if text is not None and text.casefold() not in self._asked_texts:  # not a question of another task
                    yield self._of_no_task(text, "near-miss", number, pictured=True)

    def texts(self) -> Iterator[GateQuestion]:
        """For classifiers of text: as they stand, and with phrases around them.

        Requests of no task have such phrases as well, and phrases stand alone: nothing is learnt from them.
        """
        rng = self._rng
        for task, examples in [*self._own.items(), (None, self._base)]:
            for number, example in enumerate(examples):
                part, fold = _part(number), number % FOLDS
                for kind, vary in (("plain", plain), ("wrapped", wrapped)):
                    messages = vary(example.messages, self._phrases[part], rng)
                    yield GateQuestion(messages, (), task, kind, part, fold=fold)
        yield from self._given_requests()
        for number, request in enumerate(self._requests):
            yield self._of_no_task(request.text, "everyday", number, pictured=False)
            if number % WRAPPED == 0:
                around = rng.choice(self._phrases[_part(number)].wrappers)
                yield self._of_no_task(around.replace("{question}", request.text), "everyday", number, pictured=False)
        for part, known in self._phrases.items():
            phrases_alone = [wrapper.replace("{question}", "").strip() for wrapper in known.wrappers]
            for number, text in enumerate((*filter(None, phrases_alone), *known.sentences)):
                fold = FOLDS - 1 if part == "held_out" else number % (FOLDS - 1)
                yield GateQuestion([message("user", text)], (), None, "phrase", part, fold=fold)
        yield from self._noise()

    def given_near_misses(self, examples: Sequence[Example]) -> Iterator[GateQuestion]:
        """The user's, as they stand."""
        for number, example in enumerate(self._some(examples, BACKGROUND)):
            yield GateQuestion(example.messages, example.images, None, GIVEN, _part(number), fold=number % FOLDS)

    def _noise(self) -> Iterator[GateQuestion]:
        """Random words and random letters."""
        rng = self._rng
        for number in range(NOISE):
            part = _part(number)
            count = rng.randint(1, 24)
            if number % 2:
                words = [rng.choice(rng.choice(self._phrases[part].sentences).split()) for _ in range(count)]
            else:
                letters = "abcdefghijklmnopqrstuvwxyz" + " 0123456789.,;!?" * (number % 4)
                words = ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(count)]
            yield self._of_no_task(" ".join(words), "noise", number, pictured=rng.random() < 0.5)

    def _of_no_task(self, text: str, kind: str, number: int, *, pictured: bool) -> GateQuestion:
        part, fold = _part(number), number % FOLDS
        if pictured and self._pictured:
            example = self._rng.choice(self._pictured)
            return GateQuestion(with_text(example.messages, text), example.images, None, kind, part, fold=fold)
        return GateQuestion([message("user", text)], (), None, kind, part, fold=fold)

    def _some(self, examples: Sequence[Example], count: int) -> list[Example]:
        """At most so many, in their order."""
        rows = sorted(self._rng.sample(range(len(examples)), min(count, len(examples))))
        return [examples[row] for row in rows]


def _part(number: int) -> Part:
    return "held_out" if number % FOLDS == FOLDS - 1 else "fit"


def _parts(known: Phrases) -> dict[Part, Phrases]:
    """The phrases of the fit, and those held out."""

    def of(part: Part) -> Phrases:
        def some(values: Any) -> Any:
            return tuple(value for number, value in enumerate(values) if _part(number) == part)

        return Phrases(some(known.wrappers), some(known.systems), some(known.sentences), some(known.turns))

    return {"fit": of("fit"), "held_out": of("held_out")}
