"""Whether pictures that chat clients have made anew can be told from others that nearly look the same.

    python -m benchmarks.pictures.alike --output benchmarks/results/pictures_alike.json

Pictures are brought to a square of cells, each the mean of its part in grey; two are as different as the cells that
differ most, in levels of 255. For each kind of picture and number of cells: the largest difference between a picture
and what a client makes of it, and the smallest to its twin, in which one word, digit or bar is another. Where the
second is not above the first, no threshold tells them apart.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from PIL import Image, ImageOps

import benchmarks.pictures.alike as about
from benchmarks.pictures.__main__ import table
from benchmarks.pictures.files import SENT, chart, form, screenshot
from benchmarks.record import keep, parser_of

KINDS: Final[dict[str, Callable[..., bytes]]] = {"screenshots": screenshot, "forms": form, "charts": chart}
SIDES: Final = (32, 64, 128, 256, 512)


def cells(data: bytes, side: int) -> np.ndarray:
    """[side, side] float32"""
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("L")
    return np.asarray(picture.resize((side, side), Image.Resampling.BOX), np.float32)


def measure(kind: str, count: int) -> list[dict[str, Any]]:
    found: dict[int, tuple[list[float], list[float]]] = {side: ([], []) for side in SIDES}
    for seed in range(count):
        data, twin = KINDS[kind](seed), KINDS[kind](seed, twin=True)
        sent = [as_sent(data) for as_sent in SENT.values()]
        for side, (anew, others) in found.items():
            own = cells(data, side)
            anew += [float(np.abs(own - cells(each, side)).max()) for each in sent]
            others.append(float(np.abs(own - cells(twin, side)).max()))
    return [
        {"pictures": kind, "cells a side": side, "made anew, at most": max(anew), "its twin, at least": min(others)}
        for side, (anew, others) in found.items()
    ]


def main() -> int:
    parser = parser_of(about.__doc__)
    parser.add_argument("--count", type=int, default=12, help="pictures of a kind (default: 12)")
    options = parser.parse_args()
    rows = [row for kind in KINDS for row in measure(kind, options.count)]
    print(table(rows))
    keep({"benchmark": "pictures_alike", "count": options.count, "rows": rows}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
