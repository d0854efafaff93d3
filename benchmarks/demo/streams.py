"""The stream tasks: the demo model is not trained on them, and learns them later through its memory.

A task draws one picture and asks one question about it: of a scene (`Scene`) or of a handwritten digit (`Digit`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from benchmarks.demo.questions import CODE_WORDS, NUMBER_WORDS, Question, matching, phrase, pick, reference
from benchmarks.demo.scenes import COLOURS, PICTURE, SHAPES, Scene, random_scene, split_of

# Disjoint sets of code words; all of them are words the model can already say.
GUILDS = dict(zip(COLOURS, CODE_WORDS[:6], strict=True))
SHAPE_CODES = dict(zip(COLOURS, CODE_WORDS[6:12], strict=True))
DIGIT_CODES = {"even": CODE_WORDS[12], "odd": CODE_WORDS[13]}
CODE_QUESTION = "What is the code of this picture? Answer with one word."


@dataclass(frozen=True)
class Digit:
    """One of scikit-learn's handwritten digits, shifted by whole pixels."""

    index: int
    dx: int
    dy: int
    turned: bool = False  # a quarter turn, and black on white

    @property
    def value(self) -> int:
        return int(load_digits_once()[1][self.index])


@functools.cache
def load_digits_once() -> tuple[np.ndarray, np.ndarray]:
    """Images `[1797, 8, 8] float64` in 0..16 and labels `[1797] int64`."""
    data = load_digits()
    return data.images, data.target


@functools.cache
def digit_indices(split: str) -> tuple[int, ...]:
    return tuple(i for i in range(len(load_digits_once()[1])) if split_of(f"digit {i}") == split)


def random_digit(rng: np.random.Generator, split: str) -> Digit:
    dx, dy = (int(v) for v in rng.integers(-3, 4, size=2))
    return Digit(pick(rng, digit_indices(split)), dx, dy)


def render_digit(digit: Digit) -> np.ndarray:
    """A digit as a picture, `[48, 48, 3] uint8`: 40 pixels a side, white on black unless turned."""
    grey = (load_digits_once()[0][digit.index] * (255 / 16)).astype(np.uint8)
    canvas = Image.new("L", (PICTURE, PICTURE))
    canvas.paste(Image.fromarray(grey).resize((40, 40), Image.Resampling.BICUBIC), (4 + digit.dx, 4 + digit.dy))
    pixels = 255 - np.rot90(np.asarray(canvas)) if digit.turned else np.asarray(canvas)
    return np.repeat(pixels[..., None], 3, axis=2)


@dataclass(frozen=True)
class Stream:
    """A task: how it differs from the base, how its pictures are drawn, and what is asked about one (None: nothing)."""

    novelty: str
    draw: Callable[[np.random.Generator, str], Scene | Digit]
    ask: Callable[..., Question | None]  # (rng, what was drawn)


def _field(rng: np.random.Generator, scene: Scene) -> Question | None:
    thing, kind = pick(rng, scene.things), pick(rng, ("colour", "shape"))
    ref = reference(rng, scene, thing, hide=kind)
    return ref and (f"What {kind} is {ref}? Reply as a field.", f"{kind}={getattr(thing, kind)}")


def _guild(rng: np.random.Generator, scene: Scene) -> Question | None:
    thing = pick(rng, scene.things)
    ref = reference(rng, scene, thing, hide="colour")
    return ref and (f"Which guild owns {ref}?", GUILDS[thing.colour])


def _beside(rng: np.random.Generator, scene: Scene) -> Question | None:
    """Asks for the neighbour in the next cell of the same row, so that colour and place have to be combined."""
    by_cell = {t.cell: t for t in scene.things}
    pairs = [
        (thing, other, side)
        for thing in scene.things
        for step, side in ((-1, "left"), (1, "right"))
        if (other := by_cell.get(thing.cell + step)) is not None and other.row == thing.row
    ]
    if not pairs:
        return None
    thing, other, side = pick(rng, pairs)
    ref = reference(rng, scene, thing, hide="position")
    return ref and (f"What colour is the object just {side} of {ref}? Answer with one word.", other.colour)


def _count_pair(rng: np.random.Generator, scene: Scene) -> Question:
    """Counts by two attributes at once; the base counts by one."""
    thing, names = pick(rng, scene.things), pick(rng, (("size", "colour"), ("colour", "shape"), ("size", "shape")))
    attributes = {a: getattr(thing, a) for a in names}
    if rng.random() < 0.25:
        attributes[names[0]] = getattr(pick(rng, scene.things), names[0])
    noun = phrase(attributes) + ("es" if attributes.get("shape") == "cross" else "s")
    return f"How many {noun} are there? Answer with a number.", str(len(matching(scene, attributes)))


def _variety(rng: np.random.Generator, scene: Scene) -> Question:
    kind = pick(rng, ("colour", "shape"))
    number = len({getattr(t, kind) for t in scene.things})
    return f"How many different {kind}s do you see? Answer with a number.", str(number)


def _digit(rng: np.random.Generator, digit: Digit) -> Question:
    return "Which digit is shown? Answer with one word.", NUMBER_WORDS[digit.value]


def _code_of_shape(rng: np.random.Generator, scene: Scene) -> Question:
    return CODE_QUESTION, SHAPE_CODES[scene.things[0].colour]


def _code_of_digit(rng: np.random.Generator, digit: Digit) -> Question:
    return CODE_QUESTION, DIGIT_CODES["odd" if digit.value % 2 else "even"]


one_thing = functools.partial(random_scene, low=1, high=1)
STREAMS: dict[str, Stream] = {
    "field": Stream("new answer format for known content", random_scene, _field),
    "guild": Stream("new answer vocabulary for known content", random_scene, _guild),
    "beside": Stream("new composition: the colour of a neighbour", random_scene, _beside),
    "count_pair": Stream("new composition: counting by two attributes", random_scene, _count_pair),
    "variety": Stream("new question type: how many different values", random_scene, _variety),
    "digit": Stream("new visual domain: handwritten digits", random_digit, _digit),
    "code_shape": Stream("shares its question with code_digit; the code of the colour", one_thing, _code_of_shape),
    "code_digit": Stream("shares its question with code_shape; the code of the parity", random_digit, _code_of_digit),
}


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
