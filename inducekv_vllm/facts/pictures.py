"""Pictures of questions: a picture is one more word of its question, and its vector is the picture's state.

The state is the mean, over the tokens that the picture became, of the first layer's attention values: a linear map of
what the tower has put out. It lies in the KV cache, whoever has computed it. Even different pictures have states that
are much alike, so a task's are centred and whitened with those that are stored. With fewer than `FEW` of these, a
picture is like itself alone.

Shapes: P stored pictures, F = J D features of a layer's values, d size of a word's vector, n words.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Final

import numpy as np

from ..retrieval.entry_terms import FloatArray
from .index import Vectors
from .words import own_direction, words_of

LAYER: Final = 0  # whose values tell pictures from each other
FEW: Final = 8
SAME: Final = 0.9995  # cosine of the states of one picture, computed twice
SHRINKAGE: Final = 0.3  # of the variances, towards their mean
MOST_MEASURED: Final = 512  # stored pictures that say how pictures differ
_MARK: Final = "picture:"  # no word of a text has a colon
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


def asked_words(question: str, picture: str | None) -> tuple[str, ...]:
    """The words by which a question is found; its packed picture is the last of them."""
    return (*words_of(question), *([] if picture is None else [f"{_MARK}{picture}"]))


class PictureVectors:
    """Vectors of words, and of pictures: [n, d + F] float32 of norm 1. No word is like a picture."""

    def __init__(self, words: Vectors, pictures: Sequence[str]) -> None:
        """`pictures` are those of a task's stored questions, packed; at least one."""
        self._words = words
        self._size = words(["a"]).shape[1]  # d
        states = np.stack([unpacked(each) for each in dict.fromkeys(pictures)])  # [P, F]
        self._compared: _Whitened | _Same = _Whitened(states) if len(states) >= FEW else _Same(states)

    def __call__(self, words: Sequence[str]) -> FloatArray:
        pictures = [at for at, word in enumerate(words) if word.startswith(_MARK)]
        texts = [at for at, word in enumerate(words) if not word.startswith(_MARK)]
        vectors = np.zeros((len(words), self._size + self._compared.size), dtype=np.float32)
        if texts:
            vectors[texts, : self._size] = self._words([words[at] for at in texts])
        if pictures:
            states = np.stack([unpacked(words[at].removeprefix(_MARK)) for at in pictures])
            vectors[pictures, self._size :] = self._compared(states)
        return vectors


class _Whitened:
    """States as far as they differ from the mean of those that are stored, in units of how much these do."""

    def __init__(self, states: FloatArray) -> None:
        """`states` [P, F]"""
        self.size = states.shape[1]
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


class _Same:
    """A direction of its own for each picture; those that are the same to `SAME` share one."""

    def __init__(self, states: FloatArray) -> None:
        """`states` [P, F]"""
        self.size = states.shape[1]
        self._stored = states

    def __call__(self, states: FloatArray) -> FloatArray:
        """[n, F] of norm 1."""
        cosines = states @ self._stored.T  # [n, P]
        names = [
            packed(self._stored[of_state.argmax()] if of_state.max() >= SAME else state)
            for state, of_state in zip(states, cosines, strict=True)
        ]
        return np.stack([own_direction(name, self.size) for name in names])
