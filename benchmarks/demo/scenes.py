"""Scenes of coloured shapes on a 3 x 3 grid, and their pictures.

Which split a scene belongs to follows from its content alone (`split_of`), so no picture, nor any arrangement of
objects, is ever shared between train, validation and test; the model is trained on the train share only.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass

import numpy as np

PICTURE = 48  # pixels a side
CELL = 16  # pixels a grid cell
COLOURS = {
    "red": (225, 40, 40),
    "green": (40, 190, 60),
    "blue": (50, 90, 240),
    "yellow": (240, 220, 50),
    "purple": (170, 60, 200),
    "white": (240, 240, 240),
}
SHAPES = ("circle", "square", "triangle", "cross")
SIZES = ("small", "large")
POSITIONS = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
SPLITS = ("train", "validation", "test")

_RADIUS = {"small": 3.4, "large": 6.6}
_JITTER = {"small": 3, "large": 1}  # pixels an object may stray from its cell's middle


@dataclass(frozen=True)
class Thing:
    """One object: its cell (0..8, row by row), its attributes, and its offset in pixels from the cell's middle."""

    cell: int
    colour: str
    shape: str
    size: str
    dx: int = 0
    dy: int = 0

    @property
    def position(self) -> str:
        return POSITIONS[self.cell]

    @property
    def row(self) -> int:
        return self.cell // 3

    @property
    def column(self) -> int:
        return self.cell % 3


@dataclass(frozen=True)
class Scene:
    """Objects ordered by cell, and the seed of the picture's background and colour variation."""

    things: tuple[Thing, ...]
    paint_seed: int

    @property
    def layout(self) -> str:
        """The arrangement without offsets and paint: what decides the split."""
        return ";".join(f"{t.cell} {t.size} {t.colour} {t.shape}" for t in self.things)


def stable_hash(text: str) -> int:
    """A hash that is the same in every process (unlike `hash`)."""
    return zlib.crc32(text.encode())


def split_of(key: str) -> str:
    """The split that owns `key`: about 70% train, 12% validation, 18% test."""
    share = stable_hash("split:" + key) % 100
    return "train" if share < 70 else "validation" if share < 82 else "test"


def random_scene(rng: np.random.Generator, split: str, low: int = 2, high: int = 5) -> Scene:
    """A scene of `low` to `high` objects that belongs to `split`.

    Attributes come from a small palette chosen for the scene, so that counts above one are common.
    """
    while True:
        count = int(rng.integers(low, high + 1))
        colours = rng.permutation(list(COLOURS))[: rng.integers(2, 5)]
        shapes = rng.permutation(list(SHAPES))[: rng.integers(2, 5)]
        things = tuple(
            random_thing(rng, int(cell), str(rng.choice(colours)), str(rng.choice(shapes)))
            for cell in sorted(rng.permutation(9)[:count])
        )
        scene = Scene(things, int(rng.integers(2**31)))
        if split_of(scene.layout) == split:
            return scene


def random_thing(rng: np.random.Generator, cell: int, colour: str, shape: str) -> Thing:
    size = SIZES[rng.integers(2)]
    reach = _JITTER[size]
    dx, dy = (int(v) for v in rng.integers(-reach, reach + 1, size=2))
    return Thing(cell, colour, shape, size, dx, dy)


@functools.cache
def _mask(shape: str, size: str) -> np.ndarray:
    """Coverage of one object centred in a cell, `[16, 16] float32` in 0..1, from 4 x 4 samples a pixel."""
    radius = _RADIUS[size]
    axis = (np.arange(CELL * 4) + 0.5) / 4 - CELL / 2
    x, y = axis[None, :], axis[:, None]
    if shape == "circle":
        inside = x**2 + y**2 <= radius**2
    elif shape == "square":
        inside = (abs(x) <= radius * 0.9) & (abs(y) <= radius * 0.9)
    elif shape == "triangle":
        inside = (y <= radius * 0.9) & (y >= -radius) & (abs(x) <= (y + radius) * 0.55)
    else:
        arm = radius * 0.36
        inside = ((abs(x) <= arm) | (abs(y) <= arm)) & (abs(x) <= radius) & (abs(y) <= radius)
    return inside.reshape(CELL, 4, CELL, 4).mean(axis=(1, 3), dtype=np.float32)


def render(scene: Scene) -> np.ndarray:
    """The picture of a scene, `[48, 48, 3] uint8`: a dark sloped background, objects in slightly varied colours."""
    paint = np.random.default_rng(scene.paint_seed)
    ramp = np.linspace(-1, 1, PICTURE, dtype=np.float32)
    slope_x, slope_y = paint.uniform(-12, 12, 2)
    base = paint.uniform(12, 50, 3).astype(np.float32)
    canvas = base + (slope_x * ramp[None, :, None] + slope_y * ramp[:, None, None]).astype(np.float32)
    for thing in scene.things:
        colour = np.asarray(COLOURS[thing.colour], np.float32) + paint.uniform(-15, 15, 3).astype(np.float32)
        mask = np.roll(_mask(thing.shape, thing.size), (thing.dy, thing.dx), axis=(0, 1))[..., None]
        cell = np.s_[thing.row * CELL : (thing.row + 1) * CELL, thing.column * CELL : (thing.column + 1) * CELL]
        canvas[cell] = canvas[cell] * (1 - mask) + colour * mask
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)
