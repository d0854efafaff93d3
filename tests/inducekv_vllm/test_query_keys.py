"""Query keys: means over the prompt's hidden states, in any chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inducekv_vllm.query_keys import QueryKey, QueryKeyAccumulator


def _hidden(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens))


def _is_text(tokens: int) -> torch.Tensor:
    """Placeholders at the beginning, in the middle and at the end."""
    return torch.arange(tokens) % 7 > 2


def _key_pass(hidden: torch.Tensor, is_text: torch.Tensor, chunks: list[int]) -> QueryKey:
    keys = QueryKeyAccumulator()
    keys.start("r", "id", is_text)
    for part in hidden.split(chunks):
        assert keys.is_running("r")
        keys.add("r", part)
    assert not keys.is_running("r")
    key = keys.pop("id")
    assert key is not None
    assert keys.pop("id") is None
    return key


def _check(key: QueryKey | None, hidden: torch.Tensor, is_text: torch.Tensor) -> None:
    assert key is not None
    assert key.num_tokens == len(hidden)
    assert (key.key.shape, key.key.dtype) == ((2, 16), torch.float32)
    means = torch.stack([hidden.double().mean(0), hidden[is_text].double().mean(0)])
    np.testing.assert_allclose(key.key.numpy(), torch.nn.functional.normalize(means, dim=1).numpy(), atol=1e-6)


# [1, 2, 47] and [3, 4, 43] begin with placeholders only; [49, 1] ends with a chunk of text only.
@pytest.mark.parametrize("chunks", [[50], [1, 2, 47], [20, 20, 10], [49, 1], [3, 4, 43]])
def test_the_key_does_not_depend_on_the_chunks(chunks: list[int]) -> None:
    _check(_key_pass(_hidden(50), _is_text(50), chunks), _hidden(50), _is_text(50))


@pytest.mark.parametrize("chunks", [[12], [9, 3]])
def test_generated_tokens_do_not_count(chunks: list[int]) -> None:
    hidden = _hidden(12)
    _check(_key_pass(hidden, _is_text(10), chunks), hidden[:10], _is_text(10))


def test_sums_are_float32_for_every_model_dtype() -> None:
    hidden = (_hidden(3000) + 5).bfloat16()
    key = _key_pass(hidden, _is_text(3000), [3000])
    _check(key, hidden, _is_text(3000))
    np.testing.assert_array_equal(np.frombuffer(key.to_bytes(), np.float32).reshape(2, 16), key.key.numpy())


@pytest.mark.parametrize("text", [True, False])
def test_prompts_with_text_only_and_without_text(text: bool) -> None:
    key = _key_pass(_hidden(9), torch.full((9,), text), [9])
    assert torch.equal(key.key[1], key.key[0] if text else torch.zeros(16))


def test_a_preempted_pass_starts_over() -> None:
    hidden = _hidden(9)
    keys = QueryKeyAccumulator()
    keys.start("r", "id", _is_text(9))
    keys.add("r", hidden[:5])
    keys.restart("r")
    keys.add("r", hidden)
    _check(keys.pop("id"), hidden, _is_text(9))


def test_an_aborted_pass_leaves_no_key() -> None:
    keys = QueryKeyAccumulator()
    keys.start("r", "id", _is_text(9))
    keys.add("r", _hidden(5))
    keys.finish({"r", "unknown"})
    assert not keys.any_running
    assert keys.pop("id") is None


def test_keys_that_nobody_fetches_are_dropped_oldest_first() -> None:
    keys = QueryKeyAccumulator(max_pending=2)
    for name in "abc":
        keys.start(name, name, _is_text(1))
        keys.add(name, _hidden(1))
    assert keys.pending == 2
    assert keys.pop("a") is None
    assert keys.pop("c") is not None
