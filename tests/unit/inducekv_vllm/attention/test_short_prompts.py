"""A short prompt's one attention to memory and itself, against attention to each and their merge."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inducekv_vllm.attention.merged import cpu
from inducekv_vllm.attention.merged.merge import merge_memory
from inducekv_vllm.attention.merged.step import SHORT, ScheduledStep, plan_step
from inducekv_vllm.attention.pool import PoolShape
from tests.unit.inducekv_vllm.attention.pools import fitting_bundle, poisoned_pool, random_memory, store

J, G, D, LAYERS = 2, 3, 16, 2
SHAPE = PoolShape(entries=8, num_layers=LAYERS, num_kv_heads=J, heads_per_kv_head=G, head_size=D, value_size=D)
SCALE = D**-0.5


def planned(rows: int, earlier: int, remainder: bool) -> Any:
    """The step of one request with merged memory that computes so many rows."""
    bundle = store(poisoned_pool(SHAPE), fitting_bundle(SHAPE, 6, 4, seed=1))
    memory = random_memory(bundle, 3, remainder, seed=2, slot=1)
    acting: Any = SimpleNamespace(memory=memory, request=0, first=0, end=rows)
    blocks = torch.arange(-(-(rows + earlier) // 16))[None]
    return plan_step(ScheduledStep([acting], [rows + earlier], blocks, 16, G))


@pytest.mark.parametrize("remainder", [False, True])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_it_is_the_merge_of_both(layer: int, remainder: bool) -> None:
    rows = 21
    (span,) = planned(rows, 0, remainder).prefills
    memory, stored = span.memory, span.memory.bundle.layers[layer]
    assert stored.value_gate != 1
    assert stored.bias != 0
    query, key, value = torch.randn(rows, J * G, D), torch.randn(rows, J, D), torch.randn(rows, J, D)
    found = cpu.short_prompt_attention(query, key, value, stored, span, SCALE)

    logits = torch.einsum("rjgd,sjd->jgrs", query.double().view(rows, J, G, D), key.double()) * SCALE
    logits = logits.masked_fill(torch.ones(rows, rows, dtype=torch.bool).triu(1), -math.inf)
    own = torch.einsum("jgrs,sjd->rjgd", logits.softmax(dim=-1), value.double()).reshape(rows, J * G, D)
    own_lse = logits.logsumexp(dim=-1).permute(2, 0, 1).reshape(rows, J * G)
    of_cpu = cpu.prefill_self_lse(query, key, torch.empty(0), span, SCALE)  # as a long prompt takes it
    torch.testing.assert_close(of_cpu, own_lse.float(), atol=1e-5, rtol=1e-5)
    read, lse = cpu.prefill_memory_attention(query, stored, memory, SCALE)
    log_remainder = memory.log_remainder if remainder else None
    expected = merge_memory(own, own_lse.float(), read, lse, stored.value_gate, stored.bias, log_remainder)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_short_prompt_without_earlier_tokens_has_the_step_for_itself() -> None:
    short, long, continued = planned(SHORT, 0, False), planned(SHORT + 1, 0, False), planned(9, 5, False)
    assert short.only_span(SHORT) is short.prefills[0]
    assert short.only_span(SHORT + 1) is None  # another request is there
    assert long.only_span(SHORT + 1) is None
    assert continued.only_span(9) is None
