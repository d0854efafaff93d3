"""Pictures for tests that tell pictures from each other."""

import numpy as np
from PIL import Image


def drawings(count: int, seed: int) -> list[Image.Image]:
    """They differ in more than their noise."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (count, 3, 3, 3), dtype=np.uint8)
    return [Image.fromarray(each).resize((48, 48), Image.Resampling.BICUBIC) for each in coarse]
