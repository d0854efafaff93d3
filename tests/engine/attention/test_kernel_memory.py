"""Which rows of a step the kernels read, what graphs find in their buffers, and what is refused, by their twin."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton import OutOfResources

from benchmarks.kernels import twin
from inducekv_vllm.attention import kernel_memory
from inducekv_vllm.attention.attach import attach
from inducekv_vllm.attention.decoupled import ActiveRows, DecoupledStep, active_rows
from inducekv_vllm.attention.kernel_memory import KernelMemoryAttention
from inducekv_vllm.attention.kernel_step import GraphKind, rows_with_memory
from inducekv_vllm.attention.kernel_tables import KernelTables
from inducekv_vllm.attention.kernels import launch
from inducekv_vllm.attention.kernels.tiles import Processors
from inducekv_vllm.attention.latent import LatentLayer, attach_latent
from inducekv_vllm.attention.pool import PoolShape
from inducekv_vllm.attention.slots import ActingRows, RequestMemory
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.retrieval.entry_terms import Retrieval, entry_terms
from inducekv_vllm.vllm_seams.device import CpuDevice
from inducekv_vllm.workers.requests import acting_rows
from tests.bundles import in_layers
from tests.engine.attention.memory_world import MOST, SCALE, Step, World, requests_of, rows_of, tensors
from tests.unit.inducekv_vllm.attention.pools import (
    CPU,
    fitting_bundle,
    full_attention,
    poisoned_pool,
    random_memory,
    store,
)

STEPS: dict[str, Step] = {
    "prompts and generation": [
        (0, 0, 0, 5),
        (None, 0, 0, 3),
        (1, 4, 2, 6),
        (2, 0, 9, 1),
        (3, 0, 9, 1),
        (None, 0, 4, 1),
    ],
    "not yet active": [(1, 30, 0, 5), (2, 3, 3, 1)],
    "a prompt beside generation": [(1, 0, 0, 17), (2, 0, 9, 1), (None, 0, 9, 1), (3, 0, 9, 1)],
}


@pytest.mark.parametrize(
    ("name", "add_memory"),
    [*((name, twin.add_memory) for name in STEPS), ("a prompt beside generation", launch.add_memory)],
)
def test_a_step_adds_each_requests_memory_to_its_active_rows(name: str, add_memory: Any) -> None:
    world, step = World(add_memory), STEPS[name]
    rows = sum(scheduled for *_, scheduled in step)
    query, own, lse = tensors(rows + 2)  # two rows of padding
    world.begin(step)
    result = world.forward(query, own, lse)
    torch.testing.assert_close(result, world.expected(step, query, own, lse), rtol=1e-5, atol=1e-5)
    assert torch.equal(result[rows:], own[rows:])
    assert len(world.calls) == 1


@pytest.mark.parametrize("add_memory", [twin.add_memory, launch.add_memory])
@pytest.mark.parametrize(("chosen", "is_adjacent"), [([1, 2, 3], True), ([5], True), ([0, 2], False)])
def test_adjacent_entries_that_count_alike_are_read_without_terms(
    chosen: list[int], is_adjacent: bool, add_memory: Any
) -> None:
    world, step = World(add_memory), [(4, 0, 0, 3), (0, 0, 4, 1)]
    bundle, ones = world.memories[1].bundle, np.ones(len(chosen), dtype=np.float32)
    terms = entry_terms(Retrieval(np.array(chosen), ones), "uniform", payload_tokens=4, num_entries=6)
    world.memories.append(RequestMemory.of(bundle, terms, slot=5))
    world.tables.write(world.memories[4])
    first = bundle.first_token + chosen[0] * bundle.payload_tokens
    assert int(world.tables.slots.first_token[5]) == (first if is_adjacent else -1)
    query, own, lse = tensors(4)
    world.begin(step)
    result = world.forward(query, own, lse)
    torch.testing.assert_close(result, world.expected(step, query, own, lse), rtol=1e-5, atol=1e-5)
    world.tables.write(replace(world.memories[1], slot=5))  # the slot's next memory is weighted
    assert int(world.tables.slots.first_token[5]) == -1


@pytest.mark.parametrize("graph_rows", [None, 4])
def test_without_memory_or_in_a_graph_a_step_launches_nothing_itself(graph_rows: int | None) -> None:
    world = World()
    world.attention.attach(full_attention(), {}, [])
    assert world.attention.merged_refusal is None
    query, own, lse = tensors(4)
    world.begin([(None, 0, 0, 3), (1, 9 if graph_rows is None else 0, 0, 1)], graph_rows)
    assert torch.equal(world.forward(query, own, lse), own)
    assert world.calls == []
    assert world.chosen == ([] if graph_rows is None else [GraphKind.EVERY])
    world.attention.end_step()
    assert world.chosen[-1] == GraphKind.NONE  # of vLLM's dummy steps


@pytest.mark.parametrize("kernels", [twin, launch])
@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (GraphKind.NONE, [(None, 0, 5, 1), (None, 0, 9, 1)]),
        (GraphKind.DECOUPLED, [(2, 0, 5, 1), (None, 0, 9, 1), (3, 0, 9, 1), (2, 0, 9, 1)]),
        (GraphKind.EVERY, [(0, 0, 5, 1), (None, 0, 9, 1), (3, 0, 9, 1), (1, 0, 9, 1)]),
    ],
)
def test_the_graph_of_a_kind_launches_no_more_than_its_steps_need(kind: GraphKind, step: Step, kernels: Any) -> None:
    world = World(kernels.add_memory, map_rank=0 if kind == GraphKind.DECOUPLED else 2)
    world.attention.attach(full_attention(), {}, [])
    assert world.attention.graph_kinds == (GraphKind.NONE, GraphKind.DECOUPLED, GraphKind.EVERY)
    world.begin(step, graph_rows=MOST)
    assert world.chosen == [kind]
    world.attention._in_step = False  # what the captured graph does
    world.attention.capture_for(kind)
    query, own, lse = tensors(MOST)
    assert world.attention.needs_lse(MOST) == (kind == GraphKind.EVERY)
    result = world.forward(query, own, lse)
    assert len(world.calls) == (kind != GraphKind.NONE)
    torch.testing.assert_close(result, world.expected(step, query, own, lse), rtol=1e-5, atol=1e-5)
    for *_, shape in world.calls:
        assert (shape.maps, shape.lse) == (kind == GraphKind.EVERY,) * 2


@pytest.mark.parametrize("graph_rows", [None, MOST])
def test_nothing_is_launched_in_a_layer_in_which_no_memory_acts(graph_rows: int | None) -> None:
    """A graph for memory in few layers launches in these; a step with memory elsewhere takes another graph."""
    world = World(few_layers=(1,))
    kinds = (GraphKind.NONE, GraphKind.FEW, GraphKind.DECOUPLED, GraphKind.EVERY)
    world.attention.attach(full_attention(), {}, [])
    assert world.attention.graph_kinds == kinds
    whole = fitting_bundle(world.pool.shape, 2, 4, seed=3, map_rank=2)
    some = random_memory(store(world.pool, in_layers(whole, (1,))), None, False, seed=5, slot=5)
    world.tables.write(some)
    world.memories.append(some)
    alone: Step = [(4, 0, 5, 1), (None, 0, 9, 1)]
    for step, kind, launches in (
        (alone, GraphKind.FEW, [1]),
        ([*alone, (1, 0, 9, 1)], GraphKind.EVERY, [0, 1]),
    ):
        world.begin(step, graph_rows)
        if graph_rows is not None:
            assert world.chosen[-1] == kind
            world.attention._in_step = False  # what the captured graph does
            world.attention.capture_for(kind)
        query, own, lse = tensors(graph_rows or len(step))
        found = []
        for layer in range(world.pool.shape.num_layers):
            world.calls.clear()
            output = own.clone()
            if world.attention.acts(layer, len(query)):
                world.attention.add(layer, query, output, lse if world.attention.needs_lse(len(query)) else None, SCALE)
            found += [layer] * len(world.calls)
            if layer == 0:
                assert torch.equal(output[0], own[0]), "a memory that is elsewhere adds nothing"
        assert found == launches
        torch.testing.assert_close(output, world.expected(step, query, own, lse), rtol=1e-5, atol=1e-5)
        world.attention.end_step()


@pytest.mark.parametrize("add_memory", [twin.add_memory, launch.add_memory])
@pytest.mark.parametrize("graph_rows", [None, 6])
@pytest.mark.parametrize("map_rank", [0, 2])
def test_the_second_of_two_memories_acts_on_what_the_first_has_made(
    map_rank: int, graph_rows: int | None, add_memory: Any
) -> None:
    """Each on its own rows; beside requests with one memory, of every form, and with none."""
    world = World(add_memory, map_rank, most_memories=2)
    world.attention.attach(full_attention(), {}, [])
    assert world.attention.graph_kinds[-1] is GraphKind.TWO
    merged, short, *_, long = world.memories
    rounds = [(merged, 0, 1, 0), (short, 1, 4, 0), (long, 2, 4, 1), (short, 5, 6, 0)]
    acting = [ActingRows(memory, number, first, end, turn) for number, (memory, first, end, turn) in enumerate(rounds)]
    query, own, lse = tensors(6)
    for now in (acting, acting[:2], acting):  # nothing is left of a step with two
        world.calls.clear()
        world.attention.begin_step(rows_of([(None, 0, 0, 6)], graph_rows), now)
        if graph_rows is not None:
            assert world.chosen[-1] == (GraphKind.TWO if now == acting else GraphKind.EVERY)
            world.attention.capture_for(world.chosen[-1])
            world.attention._in_step = False  # as the graph was captured
        result, expected = world.forward(query, own, lse), own.clone()
        world.attention.end_step()
        assert len(world.calls) == 1 + (now == acting)
        for each in now:
            here = slice(each.first, each.end)
            if each.memory is not merged:
                DecoupledStep([ActiveRows(here, each.memory)]).add(1, query, expected, None, SCALE)
        merging = world.expected([(0, 0, 0, 1), (None, 0, 0, 5)], query, own, lse)
        torch.testing.assert_close(result[1:], expected[1:], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result[0], merging[0], rtol=1e-5, atol=1e-5)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    memory = st.one_of(st.none(), st.integers(0, 3))
    request = st.tuples(memory, st.integers(0, 12), st.integers(0, 8), st.integers(1, 9))
    return draw(st.lists(request, min_size=1, max_size=7))


WORLD = World()


@settings(max_examples=200, deadline=None)
@given(steps())
def test_rows_by_brute_force(step: Step) -> None:
    rows = rows_of(step)
    found = rows_with_memory(acting_rows(requests_of(WORLD.memories, step), rows), sum(rows.num_scheduled))
    expected = [
        memory if memory is not None and past + i >= start else None
        for memory, start, past, rows in step
        for i in range(rows)
    ]
    if found is None:
        assert set(expected) <= {None}
        return
    assert found.slots.tolist() == [0 if memory is None else memory + 1 for memory in expected]
    assert [length > 0 for length in found.lengths] == [memory is not None for memory in expected]
    assert (found.merged, found.maps) == (0 in expected, bool({1, 2, 3} & set(expected)))


def test_the_warm_up_launches_each_kind_of_kernel_without_rows() -> None:
    world = World(add_memory=lambda *_: None)
    world.attention.attach(full_attention(), {}, [])
    world.attention.warm_up()
    kinds = [arguments[-1].kind for arguments in world.calls]
    assert len(set(kinds)) == len(kinds) > 10
    assert all(bool((arguments[2].tile_rows == -1).all()) for arguments in world.calls)
    for step in STEPS.values():
        rows = rows_of(step)
        found = rows_with_memory(acting_rows(requests_of(world.memories, step), rows), sum(rows.num_scheduled))
        assert found is not None
        assert world.attention._geometry.of_step(found).kind in kinds
    for rows, kind in itertools.product(range(1, MOST + 1), (GraphKind.DECOUPLED, GraphKind.EVERY)):
        assert world.attention._graphs.shape(rows, kind).kind in kinds


def test_a_model_whose_kernels_do_not_fit_the_gpu_is_refused_with_the_numbers() -> None:
    """By Triton's error at a first launch; the numbers are those of 32 heads of 128 for a KV head."""

    def add_memory(*arguments: Any) -> None:
        if arguments[-1].maps:
            raise OutOfResources(139264, 101376, "shared memory")

    world = World(add_memory)
    world.attention.attach(full_attention(), {}, [])
    message = r"3 query heads of size 16 for a KV head, .*with maps needs 139264 of shared memory, .* has 101376"
    with pytest.raises(UnsupportedModel, match=message):
        world.attention.warm_up()


def test_a_head_size_that_the_kernels_cannot_do_is_refused() -> None:
    shape = PoolShape(entries=8, num_layers=1, num_kv_heads=1, heads_per_kv_head=1, head_size=12, value_size=12)
    tables = KernelTables(2, 8, 1, CPU)
    pool, model = poisoned_pool(shape), SimpleNamespace()
    message = r"cannot serve memory: .*head size that is a multiple of 8 from 16 to 256, found 12"
    with pytest.raises(UnsupportedModel, match=message):
        KernelMemoryAttention(pool, tables, CPU, model, Processors(1), 0)  # type: ignore[arg-type]


def test_interpreted_kernels_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with pytest.raises(UnsupportedModel, match="on a GPU with TRITON_INTERPRET=1"):
        World()


def test_every_table_begins_at_16_bytes() -> None:
    """Kernels are compiled for aligned addresses, and again for others; those of layers they take as they come."""
    assert all(table.data_ptr() % 16 == 0 for table in vars(World().tables.slots).values())


class CountingDevice(CpuDevice):
    copies = 0

    def write(self, target: Tensor, source: Tensor) -> None:
        self.copies += 1
        super().write(target, source)

    def upload(self, tensor: Tensor) -> Tensor:
        self.copies += 1
        return super().upload(tensor)


def test_one_copy_fills_a_slot_and_one_writes_the_plan_of_a_step_that_is_new() -> None:
    device = CountingDevice(torch.device("cpu"))
    world = World(device=device)
    world.attention.attach(full_attention(), {}, [])
    device.copies = 0
    world.tables.write(random_memory(world.memories[0].bundle, 3, True, seed=9, slot=5))
    assert device.copies == 1
    steps: list[tuple[Step, int | None, int]] = [
        ([(1, 0, 0, 17), (2, 0, 9, 1)], None, 1),
        ([(1, 0, 5, 1), (2, 0, 9, 1)], 4, 1),
        ([(1, 0, 6, 1), (2, 0, 10, 1)], 4, 0),  # the same rows
        ([(None, 0, 6, 1)], 4, 0),
        ([(None, 0, 6, 9)], None, 0),
    ]
    for step, graph_rows, copies in steps:
        device.copies = 0
        world.begin(step, graph_rows)
        world.attention.end_step()
        assert device.copies == copies


def test_queries_that_are_quantised_for_the_cache_are_read_with_their_scale() -> None:
    class OfQuantised:
        scale = SCALE

        def forward(self, layer: Any, query: Tensor, *rest: Any, **_: Any) -> Tensor:
            assert query.dtype == torch.float8_e4m3fn
            output: Tensor = rest[4]
            return output

    world, step, impl = World(), STEPS["not yet active"], OfQuantised()
    attach(impl, 1, world.attention)
    query, own, lse = tensors(6)
    layer = SimpleNamespace(_q_scale=torch.tensor(0.5))
    rounded = (query / 0.5).to(torch.float8_e4m3fn)
    world.begin(step)
    result = impl.forward(layer, rounded, None, None, None, object(), own.clone())
    expected = world.expected(step, 0.5 * rounded.float(), own, lse)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    world.attention.end_step()
    world.begin([(None, 0, 0, 5), (None, 0, 9, 1)])  # nothing is scaled, or launched, for rows without memory
    unscaled: Any = SimpleNamespace()
    assert torch.equal(impl.forward(unscaled, rounded, None, None, None, object(), own.clone()), own)


class OfLatents:
    """As vLLM's `MLAAttention`: 20 heads, latents of 32 and 16 rotated numbers."""

    qk_nope_head_dim, qk_rope_head_dim, kv_lora_rank, v_head_dim, scale = 24, 16, 32, 8, 0.2

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.impl = self
        self.W_UK_T = torch.randn(20, 24, 32, generator=generator) / 5
        self.W_UV = torch.randn(20, 32, 8, generator=generator) / 5
        self.cached: list[Tensor] = []

    def update_kv_cache(self, kv_c_normed: Tensor, k_pe: Tensor, kv_cache: Tensor) -> None:
        self.cached += [kv_c_normed, k_pe]

    def forward_impl(
        self, q: Tensor, k_c: Tensor, k_pe: Tensor, kv_cache: Any, metadata: Any, output: Tensor
    ) -> Tensor:
        return output


@pytest.mark.parametrize("add_memory", [twin.add_memory, launch.add_memory])
@pytest.mark.parametrize("at_a_time", [3, 1024])
@pytest.mark.parametrize("most_memories", [1, 2])
def test_latents(add_memory: Any, at_a_time: int, most_memories: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU as on a CPU, and as the formula says; in pieces of a long prompt, in a graph, and of two memories."""
    monkeypatch.setattr(kernel_memory, "LATENT_ROWS", at_a_time)
    shape = PoolShape(entries=12, num_layers=2, num_kv_heads=1, heads_per_kv_head=20, head_size=48, value_size=32)
    pool, tables = poisoned_pool(shape), KernelTables(4, 6, 2, CPU)
    fields: Any = {"form": "decoupled", "weighting": "prior", "activations": {"t": "prompt"}}
    bundle = store(pool, fitting_bundle(shape, 6, 4, seed=2, **fields))
    memories = [random_memory(bundle, top_k, False, seed=slot, slot=slot) for slot, top_k in ((1, 4), (2, 6))]
    for memory in memories:
        tables.write(memory)
    of_gpu: Any = SimpleNamespace(use_mla=True)
    kernels = KernelMemoryAttention(
        *(pool, tables, CPU, of_gpu, Processors(2), MOST),
        most_memories=most_memories,
        kernels=SimpleNamespace(add_memory=add_memory),
    )
    kernels.attach(full_attention(), {}, [])
    assert "latent attention (MLA)" in str(kernels.merged_refusal)
    kernels.warm_up()
    layer, plain = OfLatents(), OfLatents()
    attach_latent("layers.1", layer, 1, kernels)
    steps: list[Step] = [[(None, 0, 0, 4), (0, 1, 0, 4), (1, 0, 3, 2)], [(None, 0, 3, 1), (1, 0, 3, 1), (0, 0, 9, 1)]]
    for step, graph_rows in ((steps[0], None), (steps[1], 4)):
        rows = rows_of(step, graph_rows)
        acting = acting_rows(requests_of(memories, step), rows)
        behind = [replace(each, memory=memories[each.memory is memories[0]], round=1) for each in acting[:1]]
        acting += behind[: most_memories - 1]
        generator = torch.Generator().manual_seed(0)
        R = graph_rows or sum(each[3] for each in step)
        query, own = torch.randn(R, 20, 40, generator=generator), torch.randn(R, 20 * 8, generator=generator)
        kernels.begin_step(rows, acting)
        if graph_rows is not None:
            kernels._in_step = False  # as a graph was captured
            kernels.capture_for(GraphKind.DECOUPLED if most_memories == 1 else GraphKind.TWO)
        nothing: Any = None
        found = layer.forward_impl(query, nothing, nothing, None, object(), own.clone())
        kernels.end_step()
        on_cpu, expected = DecoupledStep(active_rows(acting)), own.clone()
        on_cpu.add_latent(1, LatentLayer("x", plain), query, expected)  # type: ignore[arg-type]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        by_hand = own.clone()
        for each in acting:
            stored, terms = each.memory.bundle.layers[1], each.memory
            keys, values = terms.read(1)
            weights = torch.zeros(terms.num_tokens) if terms.log_weight is None else terms.log_weight
            for row, head in np.ndindex(each.end - each.first, 20):
                row += each.first
                absorbed = torch.cat([query[row, head, :24] @ plain.W_UK_T[head], query[row, head, 24:]])
                logits = keys[0] @ absorbed * plain.scale + weights + stored.bias
                share = torch.cat([logits, torch.zeros(1)]).softmax(0)[:-1]
                added = stored.value_gate * (share @ values[0]) @ plain.W_UV[head]
                by_hand[row, 8 * head : 8 * head + 8] += added
        torch.testing.assert_close(expected, by_hand, rtol=1e-4, atol=1e-4)
        assert not torch.equal(expected, own)


def test_latents_that_are_not_finite_do_not_reach_the_cache() -> None:
    """On a CPU, whose attention multiplies unused slots of a block by 0."""
    shape = PoolShape(entries=12, num_layers=2, num_kv_heads=1, heads_per_kv_head=20, head_size=48, value_size=32)
    fields: Any = {"form": "decoupled", "weighting": "prior", "activations": {"t": "prompt"}}
    memory = random_memory(store(poisoned_pool(shape), fitting_bundle(shape, 6, 4, **fields)), 4, False, seed=1)
    layer, step = OfLatents(), DecoupledStep([ActiveRows(slice(1, 2), memory)])
    attach_latent("layers.1", layer, 1, step)
    layer.update_kv_cache(torch.full((2, 32), math.inf), torch.full((2, 1, 16), math.nan), torch.zeros(1))
    for cached in layer.cached:
        assert cached[1].isfinite().all()
        assert not cached[0].isfinite().any()  # not memory's: as vLLM leaves it


def test_latents_that_are_packed_are_refused() -> None:
    layer = OfLatents()
    del layer.W_UV
    with pytest.raises(UnsupportedModel, match=r"layer layers\.3 uses OfLatents, .* latents packed; .* CPU_MLA"):
        attach_latent("layers.3", layer, 3, DecoupledStep())
