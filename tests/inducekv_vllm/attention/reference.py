"""Attention over [memory ; self] as one softmax in plain PyTorch: the reference for the backend."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from inducekv_vllm.attention.pages import LayerPages, RequestMemory


def attention_with_memory(
    query: Tensor, keys: Tensor, values: Tensor, pages: LayerPages, memory: RequestMemory, scale: float
) -> Tensor:
    """Attend from the last R of T tokens to their memory and, causally, to all T tokens.

    Args:
        query: [R, H, D], rotated.
        keys: [T, J, D], rotated; values: [T, J, D].
        scale: the model's softmax scale.

    Returns:
        [R, H, D] float64.
    """
    R, H, D = query.shape
    T, J, _ = keys.shape
    group = H // J
    index = torch.arange(pages.keys.shape[1]) if memory.token_index is None else memory.token_index  # [S]
    one, zero = torch.ones(len(index), dtype=torch.float64), torch.zeros(len(index), dtype=torch.float64)
    key_scale = one if memory.key_scale is None else memory.key_scale.double()
    value_scale = one if memory.value_scale is None else memory.value_scale.double()
    log_weight = zero if memory.log_weight is None else memory.log_weight.double()
    causal = torch.arange(T) <= torch.arange(T - R, T)[:, None]  # [R, T]

    output = torch.empty(R, H, D, dtype=torch.float64)
    for head in range(H):
        q = query[:, head].double()  # [R, D]
        memory_logits = key_scale * (q @ pages.keys[head // group, index].double().T) * scale + log_weight + pages.bias
        remainder = torch.full((R, 1), memory.log_remainder + pages.bias, dtype=torch.float64)
        self_logits = (q @ keys[:, head // group].double().T * scale).masked_fill(~causal, -math.inf)
        weights = torch.cat([memory_logits, remainder, self_logits], dim=1).softmax(dim=1)  # [R, S + 1 + T]
        memory_values = value_scale[:, None] * pages.gate * pages.values[head // group, index].double()
        no_value = torch.zeros(1, D, dtype=torch.float64)
        output[:, head] = weights @ torch.cat([memory_values, no_value, values[:, head // group].double()])
    return output
