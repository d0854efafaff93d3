"""The questions that a gate is measured with; no phrase, wording or request of them is one that gates are fitted to.

Rows of one table: of a task's own test questions, asked in many ways, how many are routed to the task; of everything
else, how many open the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
from PIL import Image, ImageFilter

from benchmarks.research.gate.wordings import listed_name, read_lists, reworded, shares_content_word
from inducekv_vllm.backbone.turns import message
from selector.data.examples import Example
from selector.gate.background import Phrases
from selector.gate.fitting_set import GateQuestion
from selector.gate.variations import (
    Vary,
    after,
    before,
    capitals,
    later_turn,
    mistyped,
    plain,
    second_turn,
    system,
    text_of,
    with_text,
    wrapped,
)


def _pale(picture: Image.Image) -> Image.Image:
    return Image.blend(picture, Image.new("RGB", picture.size, "white"), 0.5)


def _grain(picture: Image.Image) -> Image.Image:
    """Grey noise over the picture, the same in every run; `Image.effect_noise` cannot be seeded."""
    noise = np.random.default_rng(0).normal(128, 64, (picture.height, picture.width)).clip(0, 255).astype(np.uint8)
    return Image.blend(picture, Image.fromarray(noise).convert("RGB"), 0.35)


STYLES: Final[Mapping[str, Callable[[Image.Image], Image.Image]]] = {
    "pale": _pale,
    "contours": lambda picture: picture.filter(ImageFilter.CONTOUR),
    "grain": _grain,
}


WAYS: Final[Mapping[str, Vary]] = {
    "plain": plain,
    "wrapped": wrapped,
    "system prompt": system,
    "second turn": second_turn,
    "fourth turn": later_turn,
    "capitals": capitals,
    "typing errors": mistyped,
    "40 words before": before(40),
    "40 words after": after(40),
    "400 words before": before(400),
    "400 words after": after(400),
}
SHOTS: Final = 2
NEAR, NEAR_SHARED = "near-misses", "near-misses, a word shared"
EVERYDAY, NOISE, LANGUAGES = "everyday", "noise", "other languages"
LONG_WAYS: Final = ("400 words before", "400 words after")


def protocol_phrases() -> Phrases:
    lists = read_lists()
    return Phrases(lists.wrappers, lists.systems, lists.sentences, lists.turns)


def own_questions(task: str, train: Sequence[Example], test: Sequence[Example], rng: Random) -> Iterator[GateQuestion]:
    """A task's test questions in every way."""
    known, asked = protocol_phrases(), [text_of(example.messages) for example in train]
    for number, example in enumerate(test):
        for way, vary in WAYS.items():
            if way not in LONG_WAYS or number % 4 == 0:
                yield _question(vary(example.messages, known, rng), example.images, task, way)
        if (text := reworded(task, text_of(example.messages), number)) is not None:
            way = "other wording, a word shared" if shares_content_word(task, text, asked) else "other wording"
            yield _question(with_text(example.messages, text), example.images, task, way)
        shots = rng.sample(list(train), SHOTS)
        turns = [turn for shot in shots for turn in (*shot.messages, message("assistant", shot.answer))]
        images = tuple(image for shot in shots for image in shot.images) + example.images
        yield _question([*turns, *example.messages], images, task, "after examples")
        if example.images:
            other = rng.choice(train)
            yield _question(example.messages, example.images, task, "another picture style", rng.choice(list(STYLES)))
            first, *rest = example.messages
            two = [{**first, "content": [*_pictures(other.messages), *first["content"]]}, *rest]
            yield _question(two, other.images + example.images, task, "two pictures")
            yield _question(_without_pictures(example.messages), (), task, "no picture")


def other_questions(
    stream: str, train: Mapping[str, Sequence[Example]], base: Sequence[Example], rng: Random
) -> Iterator[GateQuestion]:
    """What belongs to no task.

    Args:
        stream: the name of its near-misses.
        train: training examples of each task.
    """
    known, lists = protocol_phrases(), read_lists()
    for example in base:
        yield _question(example.messages, example.images, None, "base")
        yield _question(wrapped(example.messages, known, rng), example.images, None, "base, wrapped")
    pictured = [example for example in base if example.images]

    def about_picture(text: str, kind: str) -> GateQuestion:
        if not pictured:
            return _question([message("user", text)], (), None, kind)
        example = rng.choice(pictured)
        return _question(with_text(example.messages, text), example.images, None, kind)

    asked = {listed_name(task): (task, [text_of(e.messages) for e in examples]) for task, examples in train.items()}
    for name in sorted(asked.keys() & set(lists.near_misses[stream])):
        task, training = asked[name]
        for text in lists.near_misses[stream][name]:
            yield about_picture(text, NEAR_SHARED if shares_content_word(task, text, training) else NEAR)
    for text in lists.everyday:
        yield _question([message("user", text)], (), None, EVERYDAY)
    if pictured:
        for text in (*lists.everyday, *lists.everyday_picture):
            yield about_picture(text, f"{EVERYDAY}, with a picture")
    for text in (*lists.lorem, *lists.nonsense):
        yield _question([message("user", text)], (), None, NOISE)
        if pictured:
            yield about_picture(text, NOISE)
    for number, text in enumerate(lists.languages):
        yield about_picture(text, LANGUAGES) if number % 2 else _question([message("user", text)], (), None, LANGUAGES)


def _question(
    messages: Sequence[Mapping[str, Any]],
    images: tuple[Path, ...],
    task: str | None,
    kind: str,
    style: str | None = None,
) -> GateQuestion:
    return GateQuestion(messages, images, task, kind, "held_out", style)


def _pictures(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [part for turn in messages for part in turn["content"] if part["type"] == "image"]


def _without_pictures(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**turn, "content": [part for part in turn["content"] if part["type"] != "image"]} for turn in messages]
