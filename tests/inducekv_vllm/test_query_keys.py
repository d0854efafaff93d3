from __future__ import annotations

import numpy as np
import torch

from inducekv_vllm import query_keys
from inducekv_vllm.query_keys import QueryKeys, key_to_bytes


def _hidden(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens))


def _expected(hidden: torch.Tensor) -> np.ndarray:
    mean = hidden.double().mean(0)
    return (mean / mean.norm()).numpy()


def test_the_key_does_not_depend_on_the_chunks() -> None:
    hidden = _hidden(50)
    for chunks in ([50], [1, 49], [20, 20, 10], [49, 1]):
        keys = QueryKeys()
        keys.start("r", "id", 50)
        for part in hidden.split(chunks):
            assert keys.wants("r")
            keys.add("r", part)
        assert not keys.wants("r")
        key = keys.pop("id")
        assert key is not None
        assert key.num_tokens == 50
        np.testing.assert_allclose(key.key.numpy(), _expected(hidden), atol=1e-6)
        assert keys.pop("id") is None


def test_generated_tokens_do_not_count() -> None:
    hidden = _hidden(12)
    keys = QueryKeys()
    keys.start("r", "id", 10)
    keys.add("r", hidden)
    key = keys.pop("id")
    assert key is not None
    np.testing.assert_allclose(key.key.numpy(), _expected(hidden[:10]), atol=1e-6)


def test_sums_are_float32_whatever_the_model_computes_in() -> None:
    hidden = (_hidden(3000) + 5).bfloat16()
    keys = QueryKeys()
    keys.start("r", "id", 3000)
    keys.add("r", hidden)
    key = keys.pop("id")
    assert key is not None
    np.testing.assert_allclose(key.key.numpy(), _expected(hidden), atol=1e-6)
    np.testing.assert_array_equal(np.frombuffer(key_to_bytes(key), np.float32), key.key.numpy())


def test_a_preempted_pass_starts_over() -> None:
    hidden = _hidden(9)
    keys = QueryKeys()
    keys.start("r", "id", 9)
    keys.add("r", hidden[:5])
    keys.restart("r")
    keys.add("r", hidden)
    key = keys.pop("id")
    assert key is not None
    np.testing.assert_allclose(key.key.numpy(), _expected(hidden), atol=1e-6)


def test_an_aborted_pass_leaves_no_key() -> None:
    keys = QueryKeys()
    keys.start("r", "id", 9)
    keys.add("r", _hidden(5))
    keys.finish({"r", "unknown"})
    assert not keys.running
    assert keys.pop("id") is None


def test_keys_that_nobody_fetches_are_dropped_oldest_first(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(query_keys, "MAX_PENDING", 2)
    keys = QueryKeys()
    for name in "abc":
        keys.start(name, name, 1)
        keys.add(name, _hidden(1))
    assert keys.pending == 2
    assert keys.pop("a") is None
    assert keys.pop("c") is not None
