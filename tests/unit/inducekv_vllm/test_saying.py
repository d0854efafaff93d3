"""A stored answer is said token by token, whatever the model's distribution; what is ruled out stays so."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inducekv_vllm.backbone.saying import next_token, said

TOKENS = st.lists(st.integers(0, 3), max_size=6)


@settings(deadline=None)
@given(TOKENS, TOKENS)
def test_it_goes_on_as_long_as_what_is_generated_agrees(answer: list[int], generated: list[int]) -> None:
    agrees = generated == answer[: len(generated)] and len(generated) < len(answer)
    assert next_token(answer, generated) == (answer[len(generated)] if agrees else None)


def test_the_next_token_is_certain() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    expected = torch.full((50,), -math.inf)
    expected[7] = 0.0
    assert torch.equal(said(logits, 7), expected)
    assert torch.equal(said(logits, 7).log_softmax(0), expected)
    assert torch.equal(logits, before)  # a row of the batch, which others may read


def test_what_is_ruled_out_stays_so() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    logits[[3, 7]] = -math.inf
    assert said(logits, 7) is logits
    assert torch.isneginf(said(logits, 8)[[3, 7]]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_has_the_type_of_the_logits(dtype: torch.dtype) -> None:
    row = said(torch.zeros(5, dtype=dtype), 2)
    assert (row.dtype, row.argmax().item(), row[2].item()) == (dtype, 2, 0.0)
