"""What merged and decoupled memory share on the CPU.

Shapes: see the package.
"""

import math

import torch
from torch import Tensor


def fused_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, is_causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return output [N, h, R, D] and log-sum-exp [N, h, R] for query [N, h, R, D], keys and values [N, h, S, D]."""
    # The kernel assumes contiguous head vectors without a check.
    assert query.stride(-1) == keys.stride(-1) == values.stride(-1) == 1
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, keys, values, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return output, lse


def packed_values(kv_cache: Tensor) -> Tensor:
    """View the values in a cache [blocks, J, C, 2 D], behind the keys of their block, as [blocks, J, C, D]."""
    blocks, J, C, two_d = kv_cache.shape
    return kv_cache.view(blocks, J, 2 * C, two_d // 2)[:, :, C:]


def finite_or(result: Tensor, own: Tensor) -> Tensor:
    """The result [...], with self-attention's own output where it is not finite: there, memory counts as zero.

    Both are of one shape and dtype.
    """
    return result if is_sum_finite(result) else torch.where(result.isfinite(), result, own)


def is_sum_finite(numbers: Tensor) -> bool:
    """Whether the sum of numbers is finite, on the CPU: then all of them are.

    One pass, where `isfinite` needs several and the norm of the largest is not vectorised: 30 times slower. A sum that
    overflows costs a caller the exact way.
    """
    return math.isfinite(numbers.sum(dtype=torch.float32))
