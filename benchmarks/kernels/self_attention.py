"""Self-attention with its log-sum-exp, for the measurements around the kernels.

PyTorch's FlashAttention by default. `use_fa3` takes vLLM's FlashAttention 3 instead, from its compiled library
`_vllm_fa3_C.abi3.so` alone: it writes a decode step's output in place, where PyTorch's makes one more copy of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

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
        return _on_gpu(query, keys, values, causal, scale)
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


def use_fa3(library: Path) -> None:
    """Load vLLM's FlashAttention 3, and use it from now on for float16 and bfloat16 on a GPU."""
    global _on_gpu
    torch.ops.load_library(library)
    _on_gpu = _by_fa3


def _by_torch(query: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> Attended:
    own, keys, values = (x.transpose(1, 2) for x in (query, keys, values))
    # Its causal mask ends at the last token, as that of `attend`.
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        own, keys, values, 0.0, causal, False, scale=scale
    )
    return output.transpose(1, 2), lse[..., : query.shape[1]].transpose(1, 2)


def _by_fa3(query: Tensor, keys: Tensor, values: Tensor, causal: bool, scale: float) -> Attended:
    """As vLLM 0.32 calls it (`vllm_flash_attn/flash_attn_interface.py`)."""
    (n, R, H, D), T = query.shape, keys.shape[1]
    own, keys, values = (x.flatten(0, 1) for x in (query, keys, values))  # [n tokens, heads, D]
    starts = partial(torch.arange, dtype=torch.int32, device=query.device)
    output = torch.empty_like(own)
    _, lse, *_ = torch.ops._vllm_fa3_C.fwd(
        own,
        keys,
        values,
        *(None, None, None),  # new keys and values, and q_v
        output,
        starts(0, n * R + 1, R),
        starts(0, n * T + 1, T),
        *(None, None, None),  # starts of new keys, and used lengths
        R,
        T,
        *(None, None, None),  # block table, batch index, left padding
        *(None, None, None),  # rotary embedding
        *(None, None, None),  # scales of quantised inputs
        scale,
        causal,
        *(-1, -1),  # no window
        0.0,  # no soft cap
        True,
        None,  # scheduler metadata
        0,  # splits: by its own rule
        None,
        0,
        None,
        *(1, 0, None),  # no context parallelism
    )
    return output.view(n, R, H, D), lse.T.view(n, R, H)


_on_gpu: Callable[[Tensor, Tensor, Tensor, bool, float], Attended] = _by_torch
