"""Stream tasks on which settings are searched, so that no search sees a task that is reported.

Each is new in the way of a task in `streams`, with other words, another format, another rule or other pictures.
"""

from __future__ import annotations

import numpy as np

from benchmarks.demo.questions import CODE_WORDS, NUMBER_WORDS, Question, pick, reference
from benchmarks.demo.scenes import COLOURS, SHAPES, Scene, random_scene
from benchmarks.demo.streams import Digit, Stream, one_thing, random_digit

# Code words that no task of `streams` uses.
ROADS = dict(zip(SHAPES, CODE_WORDS[14:18], strict=True))
SIGNS = dict(zip(SHAPES, CODE_WORDS[18:22], strict=True))
DIGIT_SIGNS = {"low": CODE_WORDS[22], "high": CODE_WORDS[23]}
SIGN_QUESTION = "Which sign is beside this picture? Answer with one word."


def _road(rng: np.random.Generator, scene: Scene) -> Question | None:
    thing = pick(rng, scene.things)
    ref = reference(rng, scene, thing, hide="shape")
    return ref and (f"Which road is under {ref}?", ROADS[thing.shape])


def _tag(rng: np.random.Generator, scene: Scene) -> Question | None:
    thing, kind = pick(rng, scene.things), pick(rng, ("size", "colour"))
    ref = reference(rng, scene, thing, hide=kind)
    return ref and (f"What {kind} is {ref}? Reply as a code.", f"{kind}: {getattr(thing, kind)}.")


def _under(rng: np.random.Generator, scene: Scene) -> Question | None:
    """Asks for the object in the next cell of the same column, so that shape and place have to be combined."""
    by_cell = {t.cell: t for t in scene.things}
    pairs = [
        (thing, by_cell[thing.cell + step], side)
        for thing in scene.things
        for step, side in ((-3, "over"), (3, "under"))
        if thing.cell + step in by_cell
    ]
    if not pairs:
        return None
    thing, other, side = pick(rng, pairs)
    ref = reference(rng, scene, thing, hide="position")
    return ref and (f"What shape is the object just {side} {ref}? Answer with one word.", other.shape)


def _count_either(rng: np.random.Generator, scene: Scene) -> Question:
    """Counts what has one of two attributes; the base counts by one."""
    colour, shape = pick(rng, scene.things).colour, pick(rng, scene.things).shape
    if rng.random() < 0.25:
        colour = pick(rng, tuple(COLOURS))
    number = sum(t.colour == colour or t.shape == shape for t in scene.things)
    return f"How many objects are {colour} or a {shape}? Answer with a number.", str(number)


def turned_digit(rng: np.random.Generator, split: str) -> Digit:
    """A quarter turn, and black on white."""
    digit = random_digit(rng, split)
    return Digit(digit.index, digit.dx, digit.dy, turned=True)


def _turned(rng: np.random.Generator, digit: Digit) -> Question:
    return "Which number is this? Answer with one word.", NUMBER_WORDS[digit.value]


def _sign_of_shape(rng: np.random.Generator, scene: Scene) -> Question:
    return SIGN_QUESTION, SIGNS[scene.things[0].shape]


def _sign_of_digit(rng: np.random.Generator, digit: Digit) -> Question:
    return SIGN_QUESTION, DIGIT_SIGNS["low" if digit.value < 5 else "high"]


SEARCH_STREAMS: dict[str, Stream] = {
    "road": Stream("new answer vocabulary for known content", random_scene, _road),
    "count_either": Stream("new composition: counting by either of two attributes", random_scene, _count_either),
    "turned": Stream("new visual domain: handwritten digits, turned, black on white", turned_digit, _turned),
    "tag": Stream("new answer format for known content", random_scene, _tag),
    "under": Stream("new composition: the shape of a neighbour", random_scene, _under),
    "sign_shape": Stream("shares its question with sign_digit; the sign of the shape", one_thing, _sign_of_shape),
    "sign_digit": Stream("shares its question with sign_shape; the sign of the half", turned_digit, _sign_of_digit),
}
