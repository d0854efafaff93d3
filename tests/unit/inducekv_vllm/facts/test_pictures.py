"""Which stored picture a request shows, against the covariance written out in float64."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from inducekv_vllm.errors import BundleError, TaskDataError
from inducekv_vllm.facts import PictureIndex, packed, unpacked
from inducekv_vllm.facts.pictures import FEW, LARGEST, QUANTILE, SHRINKAGE
from inducekv_vllm.teaching import fact_of
from tests.bundles import random_bundle, remade

SIZE = 24
Floats = npt.NDArray[np.float64]


def states(count: int, seed: int) -> list[str]:
    """Much alike, as those of a tower are."""
    rng = np.random.default_rng(seed)
    common = np.random.default_rng(0).standard_normal(SIZE)
    return [packed((common + 0.05 * rng.standard_normal(SIZE)).astype(np.float32)) for _ in range(count)]


def again(picture: str, seed: int = 3) -> npt.NDArray[np.float32]:
    """The same picture, computed in another batch."""
    noise = 0.002 * np.random.default_rng(seed).standard_normal(SIZE)
    return (unpacked(picture) + noise).astype(np.float32)


def whitened(stored: Sequence[str], others: Sequence[str]) -> tuple[Floats, Floats]:
    raw = np.stack([unpacked(each) for each in stored]).astype(np.float64)
    mean = raw.mean(0)
    variances, axes = np.linalg.eigh((raw - mean).T @ (raw - mean))
    floor = SHRINKAGE * variances.sum() / min(raw.shape)
    whitening = axes @ np.diag((variances.clip(0) + floor) ** -0.5) @ axes.T
    both = (np.stack([unpacked(each) for each in (*stored, *others)]) - mean) @ whitening
    both /= np.linalg.norm(both, axis=1, keepdims=True)
    return both[: len(stored)], both[len(stored) :]


@pytest.mark.parametrize("count", [FEW, 3 * SIZE])  # less and more than the state's features
def test_whitened_by_the_stored_ones(count: int) -> None:
    stored = states(count, 1)
    others = [packed(again(each)) for each in stored] + states(20, 2)
    ours, theirs = whitened(stored, others)
    between = ours @ ours.T - 2 * np.eye(count)
    threshold = min((1 + np.quantile(between.max(1), QUANTILE)) / 2, LARGEST)
    index, found_any = PictureIndex(stored), 0
    for picture, likeness in zip(others, theirs @ ours.T, strict=True):
        found = index.find(unpacked(picture))
        assert (found is not None) == (likeness.max() >= threshold)
        if found is not None:
            found_any += 1
            assert found == (stored[likeness.argmax()], pytest.approx(likeness.max(), abs=1e-4))
    assert found_any == count


def test_a_stored_picture_is_found_and_others_are_not() -> None:
    stored = states(12, 1)
    index = PictureIndex(stored)
    for picture in stored:
        for found in (index.find(unpacked(picture)), index.find(again(picture))):
            assert found is not None
            assert found[0] == picture
    assert [index.find(unpacked(picture)) for picture in states(20, 7)] == [None] * 20


def test_few_pictures_are_like_themselves_alone() -> None:
    stored = states(FEW - 1, 1)
    index = PictureIndex(stored)
    assert packed(again(stored[2])) != stored[2]
    assert index.find(again(stored[2])) == (stored[2], pytest.approx(1, abs=1e-3))
    assert [index.find(unpacked(picture)) for picture in states(20, 9)] == [None] * 20


def test_one_picture() -> None:
    (picture,) = states(1, 1)
    index = PictureIndex([picture])
    assert index.find(again(picture)) == (picture, pytest.approx(1, abs=1e-3))
    assert index.find(unpacked(states(1, 2)[0])) is None


def test_pictures_that_are_all_alike() -> None:
    """Nothing is like the mean of stored pictures that do not differ but themselves."""
    alike = [packed(again(states(1, 1)[0], seed)) for seed in range(FEW)]
    found = PictureIndex(alike).find(unpacked(alike[3]))
    assert found is not None
    assert found[0] == alike[3]


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
    """The state has the model's size."""
    bundle = random_bundle()
    size = bundle.metadata.backbone.num_kv_heads * bundle.metadata.backbone.head_dim

    def with_picture(features: int, **changes: Any) -> object:
        state = packed(np.ones(features, dtype=np.float32))
        return remade(bundle, facts=(fact_of("What is this?", "a", picture=state),), **changes)

    with_picture(size)
    with pytest.raises(BundleError, match=f"a picture's state has {size} numbers, found 3"):
        with_picture(3)
    with pytest.raises(BundleError, match="expected facts without pictures"):
        with_picture(size, adapter="some")
    plain = fact_of("What is this?", "a")
    assert fact_of("What is this?", "a", picture=packed(np.ones(3, dtype=np.float32))).id != plain.id
