"""What pictures are like, against the covariance written out in float64."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from inducekv_vllm.bundle import FactRecord
from inducekv_vllm.errors import BundleError, TaskDataError
from inducekv_vllm.facts import (
    PictureVectors,
    QuestionIndex,
    asked_words,
    fit_threshold,
    own_direction,
    packed,
    unpacked,
)
from inducekv_vllm.facts.pictures import FEW, SHRINKAGE
from inducekv_vllm.teaching import fact_of
from tests.bundles import random_bundle, remade

SIZE, WORD_SIZE = 24, 16
Floats = npt.NDArray[np.float32]


def word_vectors(words: Sequence[str]) -> Floats:
    return np.stack([own_direction(word, WORD_SIZE) for word in words])


def states(count: int, seed: int) -> list[str]:
    """Much alike, as those of a tower are."""
    rng = np.random.default_rng(seed)
    common = np.random.default_rng(0).standard_normal(SIZE)
    return [packed((common + 0.05 * rng.standard_normal(SIZE)).astype(np.float32)) for _ in range(count)]


def words_of(pictures: Sequence[str]) -> list[str]:
    return [asked_words("", picture)[-1] for picture in pictures]


@pytest.mark.parametrize("count", [FEW, 3 * SIZE])  # less and more than the state's features
def test_whitened_by_the_stored_ones(count: int) -> None:
    stored, others = states(count, 1), states(5, 2)
    raw = np.stack([unpacked(each) for each in stored]).astype(np.float64)
    mean = raw.mean(0)
    variances, axes = np.linalg.eigh((raw - mean).T @ (raw - mean))
    floor = SHRINKAGE * variances.sum() / min(count, SIZE)
    whitening = axes @ np.diag((variances.clip(0) + floor) ** -0.5) @ axes.T
    expected = (np.stack([unpacked(each) for each in stored + others]) - mean) @ whitening
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    vectors = PictureVectors(word_vectors, stored)(words_of(stored + others))
    np.testing.assert_allclose(vectors[:, WORD_SIZE:], expected, rtol=0, atol=1e-4)
    assert not vectors[:, :WORD_SIZE].any()


def test_few_pictures_are_like_themselves_alone() -> None:
    stored = states(FEW - 1, 1)
    vectors = PictureVectors(word_vectors, stored)
    noise = 0.002 * np.random.default_rng(3).standard_normal(SIZE)
    again = packed((unpacked(stored[2]) + noise).astype(np.float32))
    assert again != stored[2]
    cosines = vectors(words_of([again, *states(1, 9)])) @ vectors(words_of(stored)).T
    np.testing.assert_allclose(cosines[0, 2], 1, rtol=0, atol=1e-6)
    assert np.delete(cosines, 2, axis=1).max() < 0.9


def test_the_picture_is_the_word_that_tells() -> None:
    """All ask the same question; two ask of one picture, and there the other words decide."""
    stored = states(12, 1)
    asked = [asked_words("What is this?", each) for each in stored]
    asked.append(asked_words("Which weight has it?", stored[0]))
    index = QuestionIndex(asked, [*stored, stored[0]], PictureVectors(word_vectors, stored), words_of(stored))
    threshold = fit_threshold(index)
    for at, picture in enumerate(stored):
        found, scores = index.search(asked_words("Tell me what is this", picture))
        assert (found[0], scores[0] >= threshold) == (at, True)
    assert index.search(asked_words("Which weight?", stored[0]))[0][0] == 12
    for picture in states(20, 7):
        assert index.search(asked_words("What is this?", picture))[1][0] < threshold


@pytest.mark.parametrize(
    ("picture", "reason"),
    [
        ("%%%", "must be base64"),
        (base64.b64encode(b"abc").decode(), "must be base64 of float16"),
        (base64.b64encode(np.zeros(SIZE, dtype="<f2").tobytes()).decode(), "must have the norm 1, found 0"),
        (base64.b64encode(np.full(SIZE, np.nan, dtype="<f2").tobytes()).decode(), "must have the norm 1, found nan"),
        ("", "must have the norm 1"),
    ],
)
def test_what_is_no_state(picture: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        unpacked(picture)
    with pytest.raises(TaskDataError, match=reason):
        fact_of("What is this?", "a", picture=picture)


def test_in_a_bundle() -> None:
    """The state has the model's size; without one, a fact is written as before there were any."""
    bundle = random_bundle()
    size = bundle.metadata.backbone.num_kv_heads * bundle.metadata.backbone.head_dim

    def with_picture(features: int, **changes: object) -> object:
        state = packed(np.ones(features, dtype=np.float32))
        fact = fact_of("What is this?", "a", picture=state)
        return remade(bundle, facts=(fact,), fact_thresholds={"facts": 0.9}, **changes)

    with_picture(size)
    with pytest.raises(BundleError, match=f"a picture's state has {size} numbers, found 3"):
        with_picture(3)
    with pytest.raises(BundleError, match="expected facts without pictures"):
        with_picture(size, adapter="some")
    plain = fact_of("What is this?", "a")
    assert "picture" not in plain.model_dump()
    assert FactRecord.model_validate_json(plain.model_dump_json()) == plain
    assert fact_of("What is this?", "a", picture=packed(np.ones(3, dtype=np.float32))).id != plain.id
