"""What the CPU's memory attention puts in place of numbers that are not finite."""

from __future__ import annotations

import math

import pytest
import torch

from inducekv_vllm.attention.cpu_ops import finite_or

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_only_what_is_not_finite_is_replaced(dtype: torch.dtype, bad: float) -> None:
    result, own = torch.randn(2, 3, 5, 8).to(dtype)
    result[1, 2, 3] = result[2, 0, 0] = bad
    found = finite_or(result, own)
    assert torch.equal(found[1, 2, 3], own[1, 2, 3])
    assert torch.equal(found[2, 0, 0], own[2, 0, 0])
    assert int((found != result).sum()) == 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_that_cancel_are_replaced(dtype: torch.dtype) -> None:
    result, own = torch.tensor([math.inf, -math.inf, 1.0], dtype=dtype), torch.zeros(3, dtype=dtype)
    assert finite_or(result, own).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_numbers_whose_sum_overflows_are_kept(dtype: torch.dtype) -> None:
    result = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
    assert torch.equal(finite_or(result, torch.zeros_like(result)), result)
