"""Query keys: means over the prompt's hidden states, in any chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inducekv_vllm.host.device import device_of
from inducekv_vllm.workers.query_keys import KeyPassResult, QueryKeyAccumulator

CPU = torch.device("cpu")


def _hidden(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens))


def _accumulator(**options: Any) -> QueryKeyAccumulator:
    return QueryKeyAccumulator(device_of(CPU), **options)


def _key_pass(hidden: torch.Tensor, num_tokens: int, chunks: list[int]) -> KeyPassResult:
    keys = _accumulator()
    keys.start("r", "id", num_tokens)
    for part in hidden.split(chunks):
        assert keys.is_running("r")
        keys.add("r", part)
    assert not keys.is_running("r")
    key = keys.pop("id")
    assert key is not None
    assert keys.pop("id") is None
    return key


def _check(key: KeyPassResult | None, hidden: torch.Tensor) -> None:
    assert key is not None
    assert key.num_tokens == len(hidden)
    assert (key.values.shape, key.values.dtype) == ((16,), torch.float32)
    expected = torch.nn.functional.normalize(hidden.double().mean(0), dim=0)
    np.testing.assert_allclose(key.values.numpy(), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("chunks", [[50], [1, 2, 47], [20, 20, 10], [49, 1]])
def test_the_key_does_not_depend_on_the_chunks(chunks: list[int]) -> None:
    _check(_key_pass(_hidden(50), 50, chunks), _hidden(50))


@pytest.mark.parametrize("chunks", [[12], [9, 3]])
def test_generated_tokens_do_not_count(chunks: list[int]) -> None:
    hidden = _hidden(12)
    _check(_key_pass(hidden, 10, chunks), hidden[:10])


def test_sums_are_float32_for_every_model_dtype() -> None:
    hidden = (_hidden(3000) + 5).bfloat16()
    key = _key_pass(hidden, 3000, [3000])
    _check(key, hidden)
    np.testing.assert_array_equal(np.frombuffer(key.to_bytes(), np.float32), key.values.numpy())


def test_a_preempted_pass_starts_over() -> None:
    hidden = _hidden(9)
    keys = _accumulator()
    keys.start("r", "id", 9)
    keys.add("r", hidden[:5])
    keys.restart("r")
    keys.restart("another")  # no key pass
    keys.add("r", hidden)
    _check(keys.pop("id"), hidden)
    assert not keys.any_running


def test_an_aborted_pass_leaves_no_key() -> None:
    keys = _accumulator()
    keys.start("r", "id", 9)
    keys.add("r", _hidden(5))
    keys.finish({"r", "unknown"})
    assert not keys.any_running
    assert keys.pop("id") is None


def test_keys_that_nobody_fetches_are_dropped_oldest_first() -> None:
    keys = _accumulator(max_pending=2)
    for name in "abc":
        keys.start(name, name, 1)
        keys.add(name, _hidden(1))
    assert keys.pending == 2
    assert keys.pop("a") is None
    assert keys.pop("c") is not None
