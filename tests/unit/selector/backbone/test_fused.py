"""Attention with one projection for queries, keys and values computes the same once it is taken apart."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from selector.backbone.fused import take_apart

SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8}


def test_the_parts_make_the_whole() -> None:
    for bias in (False, True):
        attention: Any = nn.Module()
        attention.qkv_proj = fused = nn.Linear(16, 80, bias=bias)
        take_apart([attention, None], **SIZES)
        hidden = torch.randn(3, 5, 16)
        joined = attention.qkv_proj(hidden)
        torch.testing.assert_close(joined, fused(hidden))
        assert torch.equal(joined[..., 48:64], attention.k_proj(hidden))
        assert torch.equal(joined[..., 64:], attention.v_proj(hidden))
        assert sorted(name for name, _ in attention.named_parameters() if "weight" in name) == [
            "k_proj.weight",
            "q_proj.weight",
            "v_proj.weight",
        ]


def test_other_attention_stays() -> None:
    other, plain = SimpleNamespace(qkv_proj=nn.Linear(16, 96)), SimpleNamespace(k_proj=1, qkv_proj=nn.Linear(16, 80))
    kept = other.qkv_proj, plain.qkv_proj
    take_apart([other, plain], **SIZES)
    assert (other.qkv_proj, plain.qkv_proj) == kept
    assert not hasattr(other, "k_proj")
