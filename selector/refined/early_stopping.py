"""When a training has nothing left to gain on its validation questions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

LEAST_GAIN: Final = 0.01  # nats of an answer


def is_done(losses: Sequence[float], patience: int | None) -> bool:
    """Whether the validation losses [number of checks] end a training: nothing is left, or nothing more comes.

    Args:
        patience: how many checks in a row may pass without a gain of `LEAST_GAIN`; None: any number.
    """
    if patience is None:
        return False
    best, without_gain = math.inf, 0
    for loss in losses:
        best, without_gain = (loss, 0) if loss <= best - LEAST_GAIN else (best, without_gain + 1)
    return best <= LEAST_GAIN or without_gain >= patience
