from __future__ import annotations

import numpy as np
import torch

from inducekv_vllm import query_keys
from inducekv_vllm.query_keys import QueryKey, QueryKeys, key_to_bytes


def _hidden(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens))


def _is_text(tokens: int) -> torch.Tensor:
    """Some placeholders at the begin, in the middle and at the end."""
    return torch.arange(tokens) % 7 > 2


def _expected(hidden: torch.Tensor, is_text: torch.Tensor) -> np.ndarray:
    means = torch.stack([hidden.double().mean(0), hidden[is_text].double().mean(0)])
    return torch.nn.functional.normalize(means, dim=1).numpy()


def _check(key: QueryKey | None, hidden: torch.Tensor, is_text: torch.Tensor) -> None:
    assert key is not None
    assert key.num_tokens == len(hidden)
    assert (key.key.shape, key.key.dtype) == ((2, 16), torch.float32)
    np.testing.assert_allclose(key.key.numpy(), _expected(hidden, is_text), atol=1e-6)


def test_the_key_does_not_depend_on_the_chunks() -> None:
    hidden, is_text = _hidden(50), _is_text(50)
    # The second begins with chunks of placeholders alone, the last has a chunk that is text alone.
    for chunks in ([50], [1, 2, 47], [20, 20, 10], [49, 1], [3, 4, 43]):
        keys = QueryKeys()
        keys.start("r", "id", is_text)
        for part in hidden.split(chunks):
            assert keys.wants("r")
            keys.add("r", part)
        assert not keys.wants("r")
        _check(keys.pop("id"), hidden, is_text)
        assert keys.pop("id") is None


def test_generated_tokens_do_not_count() -> None:
    hidden = _hidden(12)
    for chunks in ([12], [9, 3]):
        keys = QueryKeys()
        keys.start("r", "id", _is_text(10))
        for part in hidden.split(chunks):
            keys.add("r", part)
        _check(keys.pop("id"), hidden[:10], _is_text(10))


def test_sums_are_float32_whatever_the_model_computes_in() -> None:
    hidden = (_hidden(3000) + 5).bfloat16()
    keys = QueryKeys()
    keys.start("r", "id", _is_text(3000))
    keys.add("r", hidden)
    key = keys.pop("id")
    assert key is not None
    _check(key, hidden, _is_text(3000))
    np.testing.assert_array_equal(np.frombuffer(key_to_bytes(key), np.float32).reshape(2, 16), key.key.numpy())


def test_text_alone_and_no_text_at_all() -> None:
    hidden = _hidden(9)
    for text in (True, False):
        keys = QueryKeys()
        keys.start("r", "id", torch.full((9,), text))
        keys.add("r", hidden)
        key = keys.pop("id")
        assert key is not None
        assert torch.equal(key.key[1], key.key[0] if text else torch.zeros(16))


def test_a_preempted_pass_starts_over() -> None:
    hidden = _hidden(9)
    keys = QueryKeys()
    keys.start("r", "id", _is_text(9))
    keys.add("r", hidden[:5])
    keys.restart("r")
    keys.add("r", hidden)
    _check(keys.pop("id"), hidden, _is_text(9))


def test_an_aborted_pass_leaves_no_key() -> None:
    keys = QueryKeys()
    keys.start("r", "id", _is_text(9))
    keys.add("r", _hidden(5))
    keys.finish({"r", "unknown"})
    assert not keys.running
    assert keys.pop("id") is None


def test_keys_that_nobody_fetches_are_dropped_oldest_first(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(query_keys, "MAX_PENDING", 2)
    keys = QueryKeys()
    for name in "abc":
        keys.start(name, name, _is_text(1))
        keys.add(name, _hidden(1))
    assert keys.pending == 2
    assert keys.pop("a") is None
    assert keys.pop("c") is not None
