"""Self-attention with its log-sum-exp, for the measurements around the kernels, by PyTorch's FlashAttention."""

from __future__ import annotations

import torch
from torch import Tensor

Attended = tuple[Tensor, Tensor]  # output [n, R, H, D], log-sum-exp [n, R, H] float32
HALF = (torch.float16, torch.bfloat16)


def attend(query: Tensor, keys: Tensor, values: Tensor, *, causal: bool, scale: float) -> Attended:
    """Attend within each of n requests.

    Args:
        query: [n, R, H, D].
        keys: [n, T, J, D], H a multiple of J.
        values: as the keys.
        causal: row r does not see the last R - 1 - r tokens; what comes before the R own tokens is seen by every row.
    """
    if query.is_cuda and query.dtype in HALF:
        return _by_torch(query, keys, values, causal, scale)
    own, keys, values = (x.transpose(1, 2) for x in (query, keys, values))  # [n, heads, tokens, D]
    keys, values = (x.repeat_interleave(own.shape[1] // keys.shape[1], dim=1) for x in (keys, values))
    R, T = query.shape[1], keys.shape[2]
    mask = torch.full((R, T), -torch.inf, device=query.device).triu(T - R + 1).to(query.dtype) if causal else None
    if not query.is_cuda:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            own, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        return output.transpose(1, 2), lse.float().transpose(1, 2)
    logits = own @ keys.mT * scale  # float32 on a GPU, which FlashAttention does not take
    if mask is not None:
        logits = logits + mask
    return (logits.softmax(-1) @ values).transpose(1, 2), logits.logsumexp(-1).transpose(1, 2)


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, *, causal: bool, scale: float) -> Attended:
    """`attend` for the rows of a step: query [R, H, D] of n requests, each with R / n of them.

    Returns:
        Output [R, H, D], log-sum-exp [R, H] float32.
    """
    of_request = query.unflatten(0, (len(keys), -1))  # [n, R / n, H, D]
    output, lse = attend(of_request, keys, values, causal=causal, scale=scale)
    return output.flatten(0, 1), lse.flatten(0, 1)


def _by_torch(query: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> Attended:
    own, keys, values = (x.transpose(1, 2) for x in (query, keys, values))
    # Its causal mask ends at the last token, as that of `attend`.
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        own, keys, values, 0.0, causal, False, scale=scale
    )
    return output.transpose(1, 2), lse[..., : query.shape[1]].transpose(1, 2)
