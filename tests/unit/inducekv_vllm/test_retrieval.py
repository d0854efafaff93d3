"""Retrieval and page terms against brute force in float64."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from inducekv_vllm.errors import ConfigError
from inducekv_vllm.retrieval.entry_terms import EntryTerms, Retrieval, entry_terms
from inducekv_vllm.retrieval.index import KeyIndex


def unit_keys(count: int, d: int, seed: int) -> npt.NDArray[np.float32]:
    keys = np.random.default_rng(seed).standard_normal((count, d))
    return (keys / np.linalg.norm(keys, axis=1, keepdims=True)).astype(np.float32)


def brute_force(
    keys: npt.NDArray[Any], query: npt.NDArray[Any], temperature: float, top_k: int | None
) -> dict[int, float]:
    scores = keys.astype(np.float64) @ query.astype(np.float64)
    retrieved = sorted(range(len(keys)), key=lambda i: (-scores[i], i))[:top_k]
    exponentials = {i: math.exp((scores[i] - scores.max()) / temperature) for i in retrieved}
    total = sum(exponentials.values())
    return {i: value / total for i, value in exponentials.items()}


@pytest.mark.parametrize("top_k", [None, 1, 7, 64, 1000])
@pytest.mark.parametrize("temperature", [0.01, 0.07, 3.0])
def test_search_is_the_softmax_of_the_scores(top_k: int | None, temperature: float) -> None:
    keys, queries = unit_keys(64, 48, seed=1).astype(np.float16), unit_keys(5, 48, seed=2)
    index = KeyIndex(keys)
    for query in queries:
        expected = brute_force(keys, query, temperature, top_k)
        retrieval = index.search(query, temperature, top_k)
        assert retrieval.entries.tolist() == list(expected)
        assert retrieval.entries.dtype == np.int64
        assert retrieval.weights.dtype == np.float32
        np.testing.assert_allclose(retrieval.weights, list(expected.values()), rtol=2e-7 / temperature, atol=1e-30)
        assert math.isclose(retrieval.weights.sum(), 1, rel_tol=1e-5)
        assert retrieval.similarity == pytest.approx((keys.astype(np.float64) @ query).max(), abs=1e-6)


def test_ties_go_to_the_first_entry() -> None:
    index = KeyIndex(np.repeat(unit_keys(1, 32, seed=3), 40, axis=0))
    for top_k in (None, 1, 17):
        retrieval = index.search(unit_keys(1, 32, seed=3)[0], 0.07, top_k)
        assert retrieval.entries.tolist() == list(range(top_k or 40))
        np.testing.assert_allclose(retrieval.weights, 1 / (top_k or 40), rtol=1e-6)


def test_a_tiny_temperature_neither_overflows_nor_divides_by_zero() -> None:
    keys = unit_keys(16, 8, seed=4)
    retrieval = KeyIndex(keys).search(keys[5], 1e-6)
    assert retrieval.entries[0] == 5
    assert retrieval.weights[0] == 1
    assert np.isfinite(retrieval.weights).all()


def test_a_query_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ConfigError, match="query key must be finite"):
        KeyIndex(unit_keys(3, 4, seed=0)).search(np.full(4, np.nan), 0.07)


@dataclass
class Scene:
    """One query [D], n tokens of its own, and the payloads of B entries of m tokens."""

    query: npt.NDArray[Any]
    self_keys: npt.NDArray[Any]  # [n, D]
    self_values: npt.NDArray[Any]
    payload_keys: npt.NDArray[Any]  # [B, m, D]
    payload_values: npt.NDArray[Any]

    def attention(self, scale: npt.NDArray[Any], weights: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Plain softmax over [self ; memory]: payloads times `scale` [B], their shares times `weights` [B]."""
        scale, weights = scale[:, None, None], np.broadcast_to(weights[:, None], self.payload_keys.shape[:2])
        keys = np.concatenate([self.self_keys, (scale * self.payload_keys).reshape(-1, 8)])
        values = np.concatenate([self.self_values, (scale * self.payload_values).reshape(-1, 8)])
        share = np.concatenate([np.ones(len(self.self_keys)), weights.ravel()]) * np.exp(keys @ self.query)
        return np.asarray(share @ values / share.sum())

    def injected(self, terms: EntryTerms) -> npt.NDArray[Any]:
        """Attention over [self ; memory ; remainder] by the definition of `EntryTerms`: gate 1, layer bias 0."""
        memory_logits = terms.key_scale[:, None] * (self.payload_keys[terms.entries] @ self.query)
        memory_logits = memory_logits + terms.log_weight[:, None]
        memory_values = terms.value_scale[:, None, None] * self.payload_values[terms.entries]
        logits = np.concatenate([self.self_keys @ self.query, memory_logits.ravel(), [terms.log_remainder]])
        values = np.concatenate([self.self_values, memory_values.reshape(-1, 8), np.zeros((1, 8))])
        share = np.exp(logits - logits.max())
        return np.asarray(share @ values / share.sum())


@pytest.fixture
def scene() -> Scene:
    rng = np.random.default_rng(7)
    return Scene(*(rng.standard_normal(shape) for shape in (8, (5, 8), (5, 8), (6, 3, 8), (6, 3, 8))))


@pytest.mark.parametrize(("weighting", "top_k"), [("sqrt", None), ("sqrt", 2), ("prior", None)])
def test_terms_are_scaled_cache_tokens_or_weigh_the_softmax(scene: Scene, weighting: str, top_k: int | None) -> None:
    """Eq. inject_rewrite: the memory's keys and values times sqrt(alpha), appended; left-out entries have alpha 0.

    With "prior" alpha multiplies the terms of the softmax instead.
    """
    keys = unit_keys(6, 16, seed=8)
    retrieval = KeyIndex(keys).search(keys[2], 0.3, top_k)
    options: dict[str, Any] = {"weighting": weighting, "payload_tokens": 3, "num_entries": 6}
    alpha = np.zeros(6)
    alpha[retrieval.entries] = retrieval.weights
    scale, weights = (np.sqrt(alpha), np.ones(6)) if weighting == "sqrt" else (np.ones(6), alpha)
    expected = scene.attention(scale, weights)
    found = scene.injected(entry_terms(retrieval, **options, remainder=top_k is not None))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    if top_k:
        assert not np.allclose(scene.injected(entry_terms(retrieval, **options)), expected, rtol=1e-3)


def test_prior_drops_entries_of_weight_zero() -> None:
    retrieval = Retrieval(np.array([3, 0, 1]), np.array([1, 1e-30, 0], dtype=np.float32))
    terms = entry_terms(retrieval, "prior", payload_tokens=3, num_entries=6)
    assert terms.entries.tolist() == [3, 0]
    assert np.isfinite(terms.log_weight).all()
    assert entry_terms(retrieval, "sqrt", payload_tokens=3, num_entries=6).entries.tolist() == [3, 0, 1]


@pytest.mark.parametrize(
    ("num_entries", "options", "left"),
    [
        (10, {"remainder": True}, 64),
        (10, {"remainder": True, "num_expired": 3}, 40),  # entries that have expired are not in the softmax
        (10, {}, 0),
        (2, {"remainder": True}, 0),
    ],
)
def test_the_remainder_counts_the_tokens_left_out(num_entries: int, options: dict[str, Any], left: int) -> None:
    retrieval = Retrieval(np.array([1, 0]), np.array([0.75, 0.25], dtype=np.float32))
    terms = entry_terms(retrieval, "sqrt", payload_tokens=8, num_entries=num_entries, **options)
    assert terms.log_remainder == pytest.approx(math.log(left) if left else -math.inf)


def test_a_search_among_some_entries_is_a_search_of_a_memory_of_those() -> None:
    keys, query = unit_keys(9, 6, seed=7), unit_keys(1, 6, seed=8)[0]
    keys[7] = keys[2]  # equal scores
    among = np.array([7, 1, 2, 4])
    for top_k in (None, 1, 2, 3, 4, 20):
        retrieval = KeyIndex(keys).search(query, 0.3, top_k, among)
        small = KeyIndex(keys[sorted(among)]).search(query, 0.3, top_k)
        np.testing.assert_array_equal(retrieval.entries, np.sort(among)[small.entries])
        np.testing.assert_array_equal(retrieval.weights, small.weights)
