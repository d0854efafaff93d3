"""The styles of pictures that a gate is measured with; gates are fitted with others (`selector.gate.encoding`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from PIL import Image, ImageFilter


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
