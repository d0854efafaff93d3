"""Query keys: means over the prompt's hidden states, in any chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from inducekv_vllm.host.device import device_of
from inducekv_vllm.workers.query_keys import QueryKeyAccumulator

CPU = device_of(torch.device("cpu"))


def _hidden(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(tokens))


def _check(keys: QueryKeyAccumulator, hidden: torch.Tensor) -> None:
    """The key pass "id" is over, and is found once."""
    assert not keys.any_running
    key = keys.pop("id")
    assert key is not None
    assert keys.pop("id") is None
    assert key.num_tokens == len(hidden)
    expected = torch.nn.functional.normalize(hidden.double().mean(0), dim=0)
    np.testing.assert_allclose(np.frombuffer(key.to_bytes(), np.float32), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "chunks"), [(50, [50]), (50, [1, 2, 47]), (50, [49, 1]), (10, [9, 3]), (10, [12])])
def test_the_key_depends_on_neither_chunks_nor_preemption_nor_generated_tokens(
    tokens: int, chunks: list[int], dtype: torch.dtype
) -> None:
    hidden, keys = (_hidden(sum(chunks)) + 5).to(dtype), QueryKeyAccumulator(CPU)
    keys.start("r", "id", tokens)
    keys.add("r", hidden[: tokens - 1])
    keys.restart("r")  # it was preempted
    keys.restart("another")  # no key pass
    for part in hidden.split(chunks):
        assert keys.is_running("r")
        keys.add("r", part)
    _check(keys, hidden[:tokens])


def test_what_nobody_fetches_is_dropped() -> None:
    """Of aborted passes at once, of others oldest first."""
    keys = QueryKeyAccumulator(CPU, max_pending=2)
    keys.start("aborted", "aborted", 9)
    keys.finish({"aborted", "unknown"})
    for name in "abc":
        keys.start(name, name, 1)
        keys.add(name, _hidden(1))
    assert not keys.any_running
    assert keys.pending == 2
    assert keys.pop("a") is None
    assert keys.pop("c") is not None
