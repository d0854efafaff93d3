"""Pictures of the model's size from vendors' drawings; a seed changes each a little.

It moves, turns, stretches and colours a drawing, and mirrors half of them.

For training a drawing is first restyled, as another vendor might have drawn it: with other colours, or with an outline.
"""

from __future__ import annotations

import io
from functools import cache
from typing import Final

import numpy as np
from PIL import Image, ImageChops, ImageEnhance, ImageFilter, ImageOps

from benchmarks.demo.scenes import PICTURE
from benchmarks.real.sources import INSTALL
from benchmarks.research.real_pictures.icons import Icons
from inducekv_vllm.errors import ConfigError

SIDE: Final = 64  # of a drawing: a little more than a picture's, so that a turned one stays sharp
HUE_SHIFT: Final = 12  # standard deviation, of 256 hues
OUTLINED: Final = 0.4  # of restyled drawings


@cache
def drawing(icons: Icons, name: str) -> Image.Image:
    """RGBA, `SIDE` pixels a side, of which it fills the width or the height: vendors leave different margins.

    Raises ConfigError: there is no resvg-py.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise ConfigError(f"the package resvg-py is not installed: {INSTALL}") from error
    png = resvg_py.svg_to_bytes(svg_string=icons.svg(name), width=2 * SIDE, height=2 * SIDE)
    whole = Image.open(io.BytesIO(bytes(png))).convert("RGBA")
    return ImageOps.pad(whole.crop(whole.getbbox()), (SIDE, SIDE), color=(0, 0, 0, 0))


def restyled(drawn: Image.Image, rng: np.random.Generator) -> Image.Image:
    """RGBA, of the same size: other hues, strength of colours and brightness, and in some cases a dark outline."""
    alpha = drawn.getchannel("A")
    hue, *others = drawn.convert("RGB").convert("HSV").split()
    shift = int(rng.normal(0, HUE_SHIFT))
    turned = Image.merge("HSV", (hue.point([(value + shift) % 256 for value in range(256)]), *others)).convert("RGB")
    colourful = ImageEnhance.Color(turned).enhance(rng.choice((0.0, 1.0), p=(0.15, 0.85)) * rng.uniform(0.5, 1.5))
    bright = ImageEnhance.Brightness(colourful).enhance(rng.uniform(0.75, 1.25))
    if rng.random() < OUTLINED:
        ink = _edges(bright, alpha).point(lambda value: min(255, 3 * value))
        bright.paste((20, 20, 20), mask=ink)
        alpha = alpha.filter(ImageFilter.MaxFilter(3))
    bright.putalpha(alpha)
    return bright


def _edges(colours: Image.Image, alpha: Image.Image) -> Image.Image:
    """L: where the drawing ends, and where its brightness changes."""
    outer = ImageChops.difference(alpha.filter(ImageFilter.MaxFilter(3)), alpha.filter(ImageFilter.MinFilter(3)))
    inner = colours.convert("L").filter(ImageFilter.FIND_EDGES)
    return ImageChops.lighter(outer, ImageChops.multiply(inner, alpha))


def picture(drawn: Image.Image, rng: np.random.Generator, strength: float = 1.0) -> np.ndarray:
    """`[48, 48, 3] uint8`: the drawing on a light ground, as it is or mirrored; `strength` scales the other changes."""
    ground = tuple(int(value) for value in 255 - rng.integers(0, 25, size=3) * strength)
    canvas = Image.new("RGBA", drawn.size, (*ground, 255))
    canvas.alpha_composite(drawn)
    turned = canvas.convert("RGB").transform(
        (PICTURE, PICTURE),
        Image.Transform.AFFINE,
        _placement(rng, strength),
        Image.Resampling.BILINEAR,
        fillcolor=ground,
    )
    gains = 1 + rng.uniform(-0.08, 0.08, size=3) * strength
    return np.clip(np.asarray(turned) * gains, 0, 255).astype(np.uint8)


def _placement(rng: np.random.Generator, strength: float) -> tuple[float, ...]:
    """The affine map from a picture's pixels to a drawing's, row by row."""
    angle, shear = rng.uniform(-0.12, 0.12, size=2) * strength
    zoom = SIDE / PICTURE * (1 + rng.uniform(0.0, 0.15) * strength)
    stretch = np.exp(rng.uniform(-0.06, 0.06) * strength)
    mirror = rng.choice((-1.0, 1.0))
    turn = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    matrix = zoom * turn @ np.array([[mirror * stretch, shear], [0.0, 1 / stretch]])
    centre = SIDE / 2 + rng.uniform(-3, 3, size=2) * strength
    offset = centre - matrix @ np.full(2, PICTURE / 2)
    return (*matrix[0], offset[0], *matrix[1], offset[1])
