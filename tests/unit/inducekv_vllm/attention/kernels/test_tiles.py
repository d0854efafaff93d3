"""Plans: every row with memory in one tile, every token of a tile in one work item, and no more than was promised."""

from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hypothesis")  # a machine with a GPU may lack it

from hypothesis import given, settings
from hypothesis import strategies as st

from inducekv_vllm.attention.kernels.geometry import KernelGeometry
from inducekv_vllm.attention.kernels.tiles import (
    LEAST_ITEM,
    MOST_LANES,
    PROGRAMS_PER_PROCESSOR,
    SMALL_MEMORY,
    LaunchShape,
    Processors,
    StepPlan,
    idle_plan,
    launch_shape,
    most_tiles,
    plan_tiles,
)

H200 = Processors(132, 227 * 1024)
# The same examples in every run, however slow the machine is.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


def _shape(**changed: Any) -> LaunchShape:
    arguments: dict[str, Any] = {
        "rows": 64,
        "slots": 64,
        "largest_slot": 64,
        "longest": 2048,
        "heads_per_kv_head": 4,
        "kv_heads": 8,
        "head_size": 128,
        "value_size": 128,
        "element_size": 2,
        "maps": False,
        "lse": True,
        "processors": H200,
    }
    return launch_shape(**(arguments | changed))


@st.composite
def steps(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, LaunchShape]:
    """Slots [R], lengths [R], and a shape that a graph of R rows would be captured with."""
    slots = np.array(draw(st.lists(st.integers(0, 6), min_size=1, max_size=80)))
    tokens = np.array([0, *draw(st.lists(st.integers(0, 4096), min_size=6, max_size=6))])
    shape = _shape(
        rows=len(slots),
        slots=len(slots),
        largest_slot=draw(st.integers(1, len(slots))),
        longest=draw(st.sampled_from([SMALL_MEMORY, 4096])),
        heads_per_kv_head=draw(st.sampled_from([1, 3, 4, 7, 16])),
        kv_heads=draw(st.integers(1, 32)),
        maps=draw(st.booleans()),
        processors=Processors(draw(st.integers(1, 200))),
    )
    return slots, tokens[slots], shape


@given(steps())
def test_a_plan_covers_rows_and_tokens_exactly_once(step: tuple[np.ndarray, np.ndarray, LaunchShape]) -> None:
    slots, lengths, shape = step
    plan = plan_tiles(slots, lengths, shape)
    assert [array.shape for array in plan.arrays()] == [array.shape for array in idle_plan(shape).arrays()]
    assert {array.dtype for array in plan.arrays()} == {np.dtype(np.int32)}
    live = plan.tile_rows >= 0
    assert sorted(plan.tile_rows[live]) == list(np.flatnonzero(slots))
    assert (np.diff(live.astype(int), axis=1) <= 0).all()  # live rows come first
    assert (np.diff(live[:, 0].astype(int)) <= 0).all()  # and so do live tiles
    for tile, slot in zip(plan.tile_rows, plan.tile_slot, strict=True):
        assert set(slots[tile[tile >= 0]]) <= {slot}
    assert plan.count.tolist() == [plan.tile_work[-1] if shape.split else live[:, 0].sum()]
    if shape.split:
        _check_items(plan, lengths, shape)
    else:
        assert plan.work.size == plan.tile_work.size == 0


def _check_items(plan: StepPlan, lengths: np.ndarray, shape: LaunchShape) -> None:
    for number, tile in enumerate(plan.tile_rows):
        items = plan.work[plan.tile_work[number] : plan.tile_work[number + 1]].tolist()
        assert bool(items) == (tile[0] >= 0)
        end = 0
        for owner, begin, stop, only in items:
            assert (owner, begin, bool(only)) == (number, end, len(items) == 1)
            assert stop - begin >= LEAST_ITEM or stop == lengths[tile[0]]
            assert begin % shape.block_tokens == 0
            end = stop
        assert end == (lengths[tile[0]] if items else 0)
    split = np.diff(plan.tile_work) > 1  # [tiles]
    assert (np.diff(split.astype(int)) <= 0).all()  # split tiles come first
    assert plan.tile_work[split.sum()] <= shape.parts <= shape.items
    assert plan.tile_work[0] == 0
    assert (plan.work[plan.tile_work[-1] :] == -1).all()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 128))
def test_no_step_needs_more_tiles_than_the_bound(members: list[int], height: int) -> None:
    needed = sum(-(-n // height) for n in members)
    assert needed <= most_tiles(sum(members), len(members), height) <= most_tiles(sum(members), sum(members), height)


@given(steps())
def test_a_shape_fits_the_kernels(step: tuple[np.ndarray, np.ndarray, LaunchShape]) -> None:
    *_, shape = step
    assert shape.block_rows in (16, 32, 64, MOST_LANES)
    assert 1 <= shape.height <= shape.block_rows
    assert shape.tiles * shape.height >= shape.rows
    assert shape.stages >= 1


def test_a_memory_is_split_only_if_it_is_long_and_processors_are_idle() -> None:
    assert not _shape(longest=SMALL_MEMORY).split
    assert _shape(longest=SMALL_MEMORY + 1).split
    assert not _shape(rows=2048, slots=1, largest_slot=2048).split
    assert _shape(rows=2048, slots=1, largest_slot=2048, kv_heads=1).split


@pytest.mark.parametrize(
    ("J", "G", "sizes", "reads"),
    [(8, 4, (128, 128), 8), (1, 16, (576, 512), 32), (8, 16, (576, 512), 32), (2, 10, (576, 512), 22)],
)
def test_a_long_memory_is_shared_out_evenly(J: int, G: int, sizes: tuple[int, int], reads: int) -> None:
    """8,192 tokens of one request take many programs; for 64 requests tiles read them, and no program twice as much."""
    head_size, value_size = sizes
    geometry = KernelGeometry(J, G, head_size, value_size, element_size=2, most_tokens=8192, processors=H200)
    for rows, fewest in ((1, 32), (64, H200.count)):
        shape = geometry.of_graph(rows, maps=False, lse=False)
        plan = plan_tiles(np.ones(rows, dtype=int), np.full(rows, 8192), shape)
        items = plan.work[: plan.count[0]] if shape.split else np.array([[0, 0, 8192, 1]] * plan.count[0])
        tokens = items[:, 2] - items[:, 1]
        assert tokens.sum() == 8192 * (1 if rows == 1 else reads)
        assert fewest <= len(items) * J <= PROGRAMS_PER_PROCESSOR * H200.count + J
        assert tokens.max() < 1.1 * tokens.sum() / len(items)


@pytest.mark.parametrize("processors", [2, 20, 132])
@pytest.mark.parametrize(("G", "J"), [(1, 32), (3, 1), (4, 8), (7, 4), (16, 2)])
def test_the_launch_of_every_graph_is_warmed_up(G: int, J: int, processors: int) -> None:
    geometry = KernelGeometry(J, G, 128, 128, element_size=2, most_tokens=4096, processors=Processors(processors))
    for lse in (False, True):
        kinds = {shape.kind for shape in geometry.variants(lse)}
        for maps in (False, True):
            assert {geometry.of_graph(rows, maps=maps, lse=lse).kind for rows in range(1, 513)} <= kinds
        for rows, maps in product((*range(1, 65), 100, 300, 1000, 3000, 10_000), (False, True)):
            for slots, longest in product({1, 2, max(1, rows // 3), rows}, (SMALL_MEMORY, 4096)):
                largest = max(1, rows - slots + 1)
                shape = geometry.shape(
                    rows=rows, slots=min(slots, rows), largest_slot=largest, longest=longest, maps=maps, lse=lse
                )
                assert shape.kind in kinds
