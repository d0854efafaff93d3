"""Query keys: means over the prompt's hidden states, in any chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from inducekv_vllm.block_sums import BlockSums
from inducekv_vllm.device import device_of
from inducekv_vllm.query_keys import QueryKey, QueryKeyAccumulator

CPU = torch.device("cpu")


def _hidden(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens))


def _is_text(tokens: int) -> torch.Tensor:
    """Placeholders at the beginning, in the middle and at the end."""
    return torch.arange(tokens) % 7 > 2


def _accumulator(**options: Any) -> QueryKeyAccumulator:
    return QueryKeyAccumulator(device_of(CPU), **options)


def _key_pass(hidden: torch.Tensor, is_text: torch.Tensor, chunks: list[int]) -> QueryKey:
    keys = _accumulator()
    keys.start("r", "id", len(is_text), int(is_text.sum()))
    generated = torch.ones(len(hidden) - len(is_text), dtype=torch.bool)
    for part, text in zip(hidden.split(chunks), torch.cat([is_text, generated]).split(chunks), strict=True):
        assert keys.is_running("r")
        keys.add("r", part, text)
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
    keys = _accumulator()
    keys.start("r", "id", 9, int(_is_text(9).sum()))
    keys.add("r", hidden[:5], _is_text(9)[:5])
    keys.restart("r")
    keys.add("r", hidden, _is_text(9))
    _check(keys.pop("id"), hidden, _is_text(9))


def test_an_aborted_pass_leaves_no_key() -> None:
    keys = _accumulator()
    keys.start("r", "id", 9, 5)
    keys.add("r", _hidden(5), _is_text(5))
    keys.finish({"r", "unknown"})
    assert not keys.any_running
    assert keys.pop("id") is None


def test_keys_that_nobody_fetches_are_dropped_oldest_first() -> None:
    keys = _accumulator(max_pending=2)
    for name in "abc":
        keys.start(name, name, 1, 1)
        keys.add(name, _hidden(1), _is_text(1))
    assert keys.pending == 2
    assert keys.pop("a") is None
    assert keys.pop("c") is not None


def test_a_pass_that_reads_the_prefix_cache_takes_the_sums_of_its_blocks() -> None:
    """Other requests fill blocks of 4 tokens, of which block 1 belonged to another prompt before."""
    hidden, is_text = _hidden(11), _is_text(11)
    sums = BlockSums(num_blocks=4, block_size=4, hidden_size=16, device=CPU)
    sums.add(_hidden(4), _is_text(4), torch.arange(4, 8))  # overwritten below
    sums.add(hidden[:3], is_text[:3], torch.arange(12, 15))  # block 3
    sums.add(hidden[3:8], is_text[3:8], torch.tensor([15, 4, 5, 6, 7]))  # the rest of it, and block 1
    assert not sums.begins_block([5, 9], [3, 3])
    assert sums.begins_block([5, 4], [3, 1])
    assert sums.begins_block([6], [3])
    sums.add(_hidden(2), _is_text(2), torch.tensor([2, 9]), begins_block=False)  # other blocks
    keys = _accumulator(block_sums=sums)
    keys.start("r", "id", 11, int(is_text.sum()), num_cached=8, cached_blocks=[3, 1])
    keys.add("r", hidden[8:], is_text[8:])
    _check(keys.pop("id"), hidden, is_text)
