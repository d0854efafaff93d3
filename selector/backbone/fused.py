"""Attention whose queries, keys and values come from one projection, as in Phi-3 and Phi-4: taken apart.

Entries and gates are read from the outputs of `k_proj` and `v_proj`. The function stays the same.

Shapes: H query heads, J KV heads, D head size, d hidden size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def take_apart(attentions: Sequence[Any], num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Give attention with a `qkv_proj` [H D + 2 J D, d] the projections `q_proj`, `k_proj` and `v_proj`; in place.

    Any other attention stays as it is.
    """
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    for attention in attentions:
        fused = getattr(attention, "qkv_proj", None)
        if isinstance(fused, nn.Linear) and not hasattr(attention, "k_proj") and fused.out_features == sum(sizes):
            biases = [None] * 3 if fused.bias is None else torch.split(fused.bias, sizes)
            parts = [_linear(*part) for part in zip(torch.split(fused.weight, sizes), biases, strict=True)]
            attention.q_proj, attention.k_proj, attention.v_proj = parts
            attention.qkv_proj = Joined(parts)


class Joined(nn.Module):
    """The projections' outputs, one behind the other. The attention has them as its own modules."""

    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        super().__init__()
        self._parts = tuple(parts)
        self.in_features, self.out_features = parts[0].in_features, sum(part.out_features for part in parts)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., d] to [..., H D + 2 J D]"""
        return torch.cat([part(hidden) for part in self._parts], dim=-1)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return made
