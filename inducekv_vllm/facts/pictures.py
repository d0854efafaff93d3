"""Pictures of questions: which stored picture a request shows.

The state is the mean, over the tokens that the picture became, of the first layer's attention values: a linear map of
what the tower has put out. It lies in the KV cache, whoever has computed it. Even different pictures have states that
are much alike, so a task's are centred and whitened with those that are stored. With fewer than `FEW` of these, a
picture is like itself alone.

Shapes: P stored pictures, F = J D features of a layer's values.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Final

import numpy as np

from ..retrieval.entry_terms import FloatArray

LAYER: Final = 0  # whose values tell pictures from each other
FEW: Final = 8
SAME: Final = 0.9995  # cosine of the states of one picture, computed twice
SHRINKAGE: Final = 0.3  # of the variances, towards their mean
MOST_MEASURED: Final = 512  # stored pictures that say how pictures differ
QUANTILE: Final = 0.95  # of the likeness of different pictures, which the threshold lies above
LARGEST: Final = 0.99
_STORED: Final = np.dtype("<f2")


def packed(state: FloatArray) -> str:
    """A picture's state [F], of any length but 0, as text: base64 of float16 numbers, of norm 1."""
    return base64.b64encode((state / np.linalg.norm(state)).astype(_STORED).tobytes()).decode()


def unpacked(picture: str) -> FloatArray:
    """[F] float32, of norm 1. Raises ValueError: it is not what `packed` gives."""
    try:
        state = np.frombuffer(base64.b64decode(picture, validate=True), dtype=_STORED).astype(np.float32)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"a picture's state must be base64 of float16 numbers: {error}") from error
    norm = float(np.linalg.norm(state))
    if not (np.isfinite(norm) and abs(norm - 1) < 0.01):
        raise ValueError(f"a picture's state must have the norm 1, found {norm:.3g}")
    unit: FloatArray = state / norm
    return unit


class PictureIndex:
    """Finds the stored picture that is like a request's.

    Each stored picture is compared with the others: the threshold lies halfway between 1 and what nearly all reach.
    """

    def __init__(self, pictures: Sequence[str]) -> None:
        """`pictures` [P], packed, at least one and none twice."""
        self.pictures = pictures
        states = np.stack([unpacked(each) for each in pictures])  # [P, F]
        self._whitened = _Whitened(states) if len(states) >= FEW else None
        self._states = states if self._whitened is None else self._whitened(states)
        self._threshold = SAME if self._whitened is None else self._fit()

    def find(self, state: FloatArray) -> tuple[str, float] | None:
        """The picture [F] that is stored, packed, with its likeness up to 1; None if none is like it."""
        state = unpacked(packed(state))  # rounded, as the stored ones are
        likeness = self._states @ (state if self._whitened is None else self._whitened(state[None])[0])  # [P]
        best = int(likeness.argmax())
        return (self.pictures[best], float(likeness[best])) if likeness[best] >= self._threshold else None

    def _fit(self) -> float:
        asked = np.unique(np.linspace(0, len(self._states) - 1, MOST_MEASURED).round().astype(int))
        likeness = self._states[asked] @ self._states.T
        likeness[np.arange(len(asked)), asked] = -1.0
        return min((1 + float(np.quantile(likeness.max(1), QUANTILE))) / 2, LARGEST)


class _Whitened:
    """States as far as they differ from the mean of those that are stored, in units of how much these do."""

    def __init__(self, states: FloatArray) -> None:
        """`states` [P, F]"""
        measured = states[np.unique(np.linspace(0, len(states) - 1, MOST_MEASURED).round().astype(int))]
        self._mean = measured.mean(0)
        _, lengths, self._axes = np.linalg.svd(measured - self._mean, full_matrices=False)  # [min(P, F), F]
        variances = lengths**2
        floor = SHRINKAGE * max(float(variances.sum()) / len(variances), 1e-12)
        self._rest = floor**-0.5  # where the stored ones do not differ
        self._along = (variances + floor) ** -0.5 - self._rest

    def __call__(self, states: FloatArray) -> FloatArray:
        """[n, F] of norm 1; 0 for the mean."""
        centred = states - self._mean
        scaled = self._rest * centred + (centred @ self._axes.T * self._along) @ self._axes
        unit: FloatArray = scaled / np.linalg.norm(scaled, axis=1, keepdims=True).clip(1e-12)
        return unit
