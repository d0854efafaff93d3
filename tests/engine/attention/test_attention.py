"""The CPU kernels, the step plan and the merge, against one plain softmax in float64."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from inducekv_vllm.attention.decoupled import ActiveRows, DecoupledStep
from inducekv_vllm.attention.merged import cpu
from inducekv_vllm.attention.merged.cpu_backend import InduceKVCPUImpl, probe_packed_layout
from inducekv_vllm.attention.merged.step import ScheduledStep, plan_step
from inducekv_vllm.attention.pool import ENTRY_TOKENS, PoolShape
from inducekv_vllm.attention.resident_bundle import ResidentBundle, kv_heads_of_rank
from inducekv_vllm.attention.slots import ActingRows, RequestMemory
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.retrieval.entry_terms import Weighting
from tests.unit.inducekv_vllm.attention.pools import fitting_bundle, poisoned_pool, random_memory, store

current_platform.import_kernels()

J, G, D, m, B, C = 2, 3, 64, 4, 6, 32
H, SCALE = J * G, 0.2
CONDITIONS = [("sqrt", None, False), ("sqrt", 2, True), ("prior", None, False), ("prior", 2, False)]

SHAPE = PoolShape(entries=12, num_layers=1, num_kv_heads=J, heads_per_kv_head=G, head_size=D, value_size=D)


def _bundle(dtype: torch.dtype, weighting: Weighting, seed: int = 0, **changes: Any) -> ResidentBundle:
    """6 entries of 4 tokens in a pool of their own."""
    return store(poisoned_pool(SHAPE, dtype), fitting_bundle(SHAPE, B, m, seed, weighting=weighting, **changes))


def _cache(keys: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each request's keys [T, J, D] in shuffled blocks, written by vLLM's own function; returns cache, block table."""
    needed = [-(-len(k) // C) for k in keys]
    order = iter(torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).tolist())
    # NaN wherever nothing was written: what is read by mistake shows.
    cache = torch.full((sum(needed), J, C, 2 * D), math.nan, dtype=dtype)
    table = torch.zeros(len(keys), max(needed), dtype=torch.int32)
    for row, (k, blocks) in enumerate(zip(keys, needed, strict=True)):
        table[row, :blocks] = torch.tensor(list(itertools.islice(order, blocks)))
        slots = table[row, torch.arange(len(k)) // C] * C + torch.arange(len(k)) % C
        key_cache, value_cache = cache.view(len(cache), J, 2 * C, D).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            k, k, key_cache, value_cache, slots.long(), "vec", k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )
    return cache.nan_to_num(0.0), table


def attention_with_memory(query: Tensor, keys: Tensor, values: Tensor, memory: RequestMemory | None) -> Tensor:
    """Attend from the last R of T tokens to their memory and, causally, to all T tokens, by one plain softmax.

    Args:
        query: [R, H, D], rotated.
        keys: [T, J, D], rotated; values: [T, J, D].

    Returns:
        [R, H, D] float64.
    """
    R, T = len(query), len(keys)
    causal = torch.arange(T) <= torch.arange(T - R, T)[:, None]  # [R, T]
    output = torch.empty(R, H, D, dtype=torch.float64)
    for head in range(H):
        q = query[:, head].double()  # [R, D]
        self_logits = q @ keys[:, head // G].double().T * SCALE
        logits, attended = [self_logits.masked_fill(~causal, -math.inf)], [values[:, head // G].double()]
        if memory is not None:
            memory_logits, memory_values = _memory_of_head(q, memory, head // G)
            logits.append(memory_logits)
            attended.append(memory_values)
        output[:, head] = torch.cat(logits, dim=1).softmax(dim=1) @ torch.cat(attended)
    return output


def _memory_of_head(q: Tensor, memory: RequestMemory, kv_head: int) -> tuple[Tensor, Tensor]:
    """Logits [R, S + 1] of S memory tokens and the remainder for queries [R, D], and their values [S + 1, D]."""
    stored = memory.bundle.layers[0]
    S = memory.num_tokens
    one, zero = torch.ones(S, dtype=torch.float64), torch.zeros(S, dtype=torch.float64)
    key_scale = one if memory.key_scale is None else memory.key_scale.double()
    value_scale = one if memory.value_scale is None else memory.value_scale.double()
    log_weight = zero if memory.log_weight is None else memory.log_weight.double()
    logits = key_scale * (q @ stored.keys[kv_head, memory.tokens].double().T) * SCALE + log_weight + stored.bias
    remainder = torch.full((len(q), 1), memory.log_remainder + stored.bias, dtype=torch.float64)
    values = value_scale[:, None] * stored.value_gate * stored.values[kv_head, memory.tokens].double()
    return torch.cat([logits, remainder], dim=1), torch.cat([values, torch.zeros(1, D, dtype=torch.float64)])


def _run_step(dtype: torch.dtype, requests: list[tuple[int, int, RequestMemory | None]]) -> float:
    """One step over (rows, tokens in all, memory) requests; the largest deviation from the reference, relative."""
    rng = torch.Generator().manual_seed(3)
    keys = [torch.randn(T, J, D, generator=rng).to(dtype) for _, T, _ in requests]
    values = [torch.randn(T, J, D, generator=rng).to(dtype) for _, T, _ in requests]
    queries = [torch.randn(R, H, D, generator=rng).to(dtype) for R, _, _ in requests]
    kv_cache, table = _cache(keys, dtype)
    starts = list(itertools.accumulate((R for R, _, _ in requests), initial=0))
    acting = [
        ActingRows(memory, number, starts[number], starts[number + 1])
        for number, (_, _, memory) in enumerate(requests)
        if memory is not None
    ]
    step = plan_step(ScheduledStep(acting, [T for _, T, _ in requests], table, C, G))

    query = torch.cat(queries)
    key, value = (
        torch.cat([each[len(each) - R :] for each, (R, _, _) in zip(of_all, requests, strict=True)])
        for of_all in (keys, values)
    )
    output = torch.cat([attention_with_memory(*qkv, None) for qkv in zip(queries, keys, values, strict=True)])
    impl = InduceKVCPUImpl.__new__(InduceKVCPUImpl)
    impl.scale = SCALE
    impl._add_memory(step, 0, query, key, value, kv_cache, output)

    worst = 0.0
    for (R, _, memory), start, q, k, v in zip(requests, starts, queries, keys, values, strict=False):
        expected = attention_with_memory(q, k, v, memory)
        worst = max(worst, float((output[start : start + R] - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize(("weighting", "top_k", "remainder"), CONDITIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
def test_a_mixed_step_equals_one_softmax(
    dtype: torch.dtype, tolerance: float, weighting: Weighting, top_k: int | None, remainder: bool
) -> None:
    bundle = _bundle(dtype, weighting)
    first, second, third, fourth = (random_memory(bundle, top_k, remainder, seed) for seed in range(4))
    other_memory = random_memory(_bundle(dtype, "prior", 1), None, False, 9)
    requests = [
        (40, 40, first),  # a whole prompt
        (1, 70, second),  # decode, several blocks
        (1, 5, None),
        (17, 80, third),  # a later chunk of a prompt
        (1, 33, fourth),  # decode, not beside the first one
        (3, 3, None),
        (1, 1, other_memory),
        (2, 50, other_memory),
        (14, 30, other_memory),  # a later chunk, within one block
    ]
    assert _run_step(dtype, requests) < tolerance


def test_decodes_with_different_numbers_of_entries_are_batched_apart() -> None:
    bundle = _bundle(torch.float32, "sqrt")
    requests = [(1, 20 + k, random_memory(bundle, k, k % 2 == 0, k)) for k in (1, 2, 3, 2, 6, 1, 1)]
    neutral = random_memory(_bundle(torch.float32, "prior"), 1, False, 0)  # its one entry has weight 1
    assert neutral.log_weight is None
    requests += [(1, 9, neutral), (8, 8, neutral)]
    assert _run_step(torch.float32, requests) < 2e-6


def test_one_entry_of_8192_tokens_for_several_requests() -> None:
    shape = replace(SHAPE, entries=8192 // ENTRY_TOKENS)
    bundle = fitting_bundle(shape, 1, 8192, weighting="uniform")
    memory = random_memory(store(poisoned_pool(shape, torch.float32), bundle), None, False, 0)
    assert _run_step(torch.float32, [(1, 20, memory), (5, 9, memory), (1, 70, memory), (1, 3, None)]) < 2e-6


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_decoupled_memory_with_maps(dtype: torch.dtype, tolerance: float, top_k: int | None) -> None:
    bundle = store(poisoned_pool(SHAPE, dtype), fitting_bundle(SHAPE, 3, m, map_rank=2))
    memory, stored = random_memory(bundle, top_k, False, 1), bundle.layers[0]
    rng = torch.Generator().manual_seed(3)
    query, output = (torch.randn(5, H, D, generator=rng).to(dtype) for _ in range(2))
    active = [ActiveRows(slice(1, 3), memory), ActiveRows(torch.tensor([4]), memory)]
    result = output.clone()
    DecoupledStep(active).add(0, query, result, None, SCALE)
    assert torch.equal(result[[0, 3]], output[[0, 3]])
    assert stored.map_in is not None
    assert stored.map_out is not None
    for row, kv_head in itertools.product((1, 2, 4), range(J)):
        heads = slice(kv_head * G, (kv_head + 1) * G)
        logits, values = _memory_of_head(query[row, heads].double(), memory, kv_head)
        logits[:, -1] = 0  # in place of the remainder: the token of logit 0 and value 0, which has no bias
        own = output[row, heads].double()
        weight = torch.ones(1) if memory.map_weight is None else memory.map_weight
        map_in, map_out = (t[kv_head, memory.map_rows].double() for t in (stored.map_in, stored.map_out))
        mapped = (weight.double() * (map_in @ own.flatten())) @ map_out
        expected = own + logits.softmax(dim=1) @ values + stored.value_gate * mapped.view(G, D)
        assert (result[row, heads] - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("form", ["decoupled", "prefill", "decode"])
def test_what_is_not_finite_is_not_added(form: str) -> None:
    """Such a number of the output stays that of self-attention, to the bit; here those of half of the columns."""
    decoupled = {"form": "decoupled", "activations": {"t": "prompt"}} if form == "decoupled" else {}
    bundle = _bundle(torch.float32, "prior", **decoupled)
    memory = random_memory(bundle, None, False, 0)
    bundle.layers[0].values[..., D // 2 :] = math.inf
    rows = 1 if form == "decode" else 3
    query, output = torch.randn(2, rows, H, D, generator=torch.Generator().manual_seed(3))
    result = output.clone()
    if form == "decoupled":
        DecoupledStep([ActiveRows(slice(0, rows), memory)]).add(0, query, result, None, SCALE)
    else:
        kv_cache, table = _cache([torch.zeros(rows, J, D)], torch.float32)
        step = plan_step(ScheduledStep([ActingRows(memory, 0, 0, rows)], [rows], table, C, G))
        impl = InduceKVCPUImpl.__new__(InduceKVCPUImpl)
        impl.scale = SCALE
        own = torch.zeros(2, rows, J, D)
        impl._add_memory(step, 0, query, *own, kv_cache, result)
    assert torch.equal(result[..., D // 2 :], output[..., D // 2 :])
    assert result.isfinite().all()
    assert (result[..., : D // 2] != output[..., : D // 2]).all()


def test_the_cache_takes_finite_numbers_of_rows_with_memory_alone() -> None:
    memory = random_memory(_bundle(torch.float32, "prior"), None, False, 0)
    key, value = torch.ones(2, 4, J, D)
    value[:3, 0, 0] = math.nan
    step = DecoupledStep([ActiveRows(slice(1, 2), memory)], [ActiveRows(torch.tensor([2]), memory)])
    assert step.cacheable(0, key, value)[1] is value  # nothing has been added before this layer's output
    cached_key, cached_value = step.cacheable(1, key, value)
    assert torch.equal(cached_key, key)
    assert cached_value[:, 0, 0].tolist() == [pytest.approx(math.nan, nan_ok=True), 0, 0, 1]
    assert value[:3, 0, 0].isnan().all()
    assert DecoupledStep().cacheable(1, key, value)[1] is value


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_packing_is_the_one_that_is_read(isa: str, dtype: torch.dtype) -> None:
    probe_packed_layout(isa, dtype, head_size=64, block_size=32)


def test_another_packing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "packed_keys", lambda cache: cache[..., : cache.shape[-1] // 2].transpose(2, 3))
    with pytest.raises(UnsupportedModel, match="'vec' packs its key blocks"):
        probe_packed_layout("vec", torch.float32, head_size=64, block_size=32)


def test_kv_heads_are_shared_out_as_vllm_does() -> None:
    assert [kv_heads_of_rank(8, rank, 4) for rank in (0, 3)] == [slice(0, 2), slice(6, 8)]
    assert [kv_heads_of_rank(2, rank, 4) for rank in range(4)] == [slice(0, 1), slice(0, 1), slice(1, 2), slice(1, 2)]
    with pytest.raises(UnsupportedModel, match="3 KV heads"):
        kv_heads_of_rank(3, 0, 2)
