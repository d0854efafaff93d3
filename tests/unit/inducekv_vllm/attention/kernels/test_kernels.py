"""The kernels against their twin, and the twin against loops in float64.

Without a GPU the kernels run in Triton's interpreter, where a program takes a tenth of a second: steps are small.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.kernels import twin
from inducekv_vllm.attention.kernels import launch

from .problems import SCALE, TOLERANCE, Geometry, Memory, Problem, by_loops, deviation, make, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED = [
    Memory(12, remainder=True, entry_tokens=4),
    Memory(12, entries_of=1, entry_tokens=4),
    Memory(9, "decoupled", map_rows=6, entry_tokens=3, map_rank=2),
    Memory(1, "decoupled"),
    Memory(10, "decoupled", map_rows=4, entry_tokens=5, map_rank=2, adjacent=True),
    Memory(6, adjacent=True, remainder=True),
]
MIXED_ROWS = [1, 0, 2, 3, 3, 0, 1, 4, 5, 6, 5]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """`torch.empty` gives NaN, so that a partial result which is read but not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def check(problem: Problem, *, split: bool = False, lse: bool = True, tolerance: float = 0.0) -> None:
    """The kernel in one launch shape against the twin, and that against loops; rows without memory to the bit.

    It is launched twice: a launch leaves nothing behind that the next one would count.
    """
    shape = problem.shape(split=split, lse=lse)
    assert shape.split == split
    rows = problem.row_slot != 0
    step, expected = (
        problem.step(shape),
        problem.output.to(torch.float32, copy=True),
    )  # what the kernels round at the end
    arguments = (step, problem.query, expected, problem.self_lse if lse else None, SCALE, shape)
    twin.add_memory(problem.pool, problem.tables, *arguments)
    tolerance = max(tolerance, TOLERANCE[problem.query.dtype])
    assert deviation(expected, by_loops(problem, lse), rows) < tolerance
    assert same_bits(expected[~rows], problem.output.float()[~rows])

    there = problem.to(DEVICE)
    launch.check(there.pool, problem.query.shape[1])
    step, self_lse = there.step(shape), there.self_lse if lse else None
    for _ in range(2 if split else 1):
        found = there.output.clone()
        launch.add_memory(there.pool, there.tables, step, there.query, found, self_lse, SCALE, shape)
        assert deviation(found, expected, rows) < tolerance
        assert same_bits(found.cpu()[~rows], problem.output[~rows])
        assert not step.arrivals.any()


@pytest.mark.parametrize("geometry", [(4, 4, 64), (3, 1, 80), (6, 2, 96), (8, 2, 128)], ids=str)
def test_a_mixed_step(geometry: Geometry) -> None:
    check(make(geometry, MIXED, MIXED_ROWS))


LATENTS: tuple[Geometry, ...] = ((16, 1, 576, 512), (6, 3, 80, 64))  # those of DeepSeek; several groups of heads


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("geometry", LATENTS, ids=str)
def test_latents(geometry: Geometry, dtype: torch.dtype, split: bool) -> None:
    """Values of another size than keys, which is no power of 2."""
    tokens = 300 if split else 12
    scattered, adjacent = Memory(tokens, "decoupled", entry_tokens=4), Memory(10, "decoupled", adjacent=True)
    check(make(geometry, [scattered, adjacent], [1, 0, 2, 1], dtype), split=split, lse=False)


@pytest.mark.parametrize(
    ("memories", "rows", "lse"),
    [
        ([Memory(70, "decoupled", entry_tokens=7)], [0, 1, 1], False),
        ([Memory(70, "decoupled", adjacent=True)], [1] * 9, False),
        ([Memory(1)], [1], True),
        ([Memory(1, "decoupled")], [1], False),
    ],
)
def test_few_rows_and_more_than_a_tile(memories: list[Memory], rows: list[int], lse: bool) -> None:
    check(make((4, 2, 64), memories, rows), lse=lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("geometry", [(4, 4, 64), (3, 1, 80)], ids=str)
def test_half_precision(geometry: Geometry, dtype: torch.dtype) -> None:
    check(make(geometry, MIXED, MIXED_ROWS, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "geometry", [(1, 1, 16), (4, 4, 64), (3, 1, 80), (6, 2, 96), (7, 1, 72), (8, 2, 128), (16, 1, 256)], ids=str
)
def test_every_variant(geometry: Geometry, dtype: torch.dtype, lse: bool, split: bool) -> None:
    long = [Memory(300, entry_tokens=4), replace(MIXED[1], tokens=300), *MIXED[2:5], replace(MIXED[5], tokens=400)]
    memories = [replace(memory, remainder=memory.remainder and lse) for memory in (long if split else MIXED)]
    memories = memories if lse else [replace(memory, form="decoupled") for memory in memories]
    check(make(geometry, [replace(memory, map_rows=0) for memory in memories], MIXED_ROWS, dtype), split=split, lse=lse)
    if DEVICE == "cuda" and dtype == torch.float32 and geometry == (16, 1, 256):
        return  # maps of as many heads need more shared memory than there is: a server refuses to start
    check(make(geometry, memories, MIXED_ROWS, dtype, seed=1), split=split, lse=lse)


@pytest.mark.parametrize("map_rows", [0, 7])
def test_a_long_memory_is_split_and_merged(map_rows: int) -> None:
    long = Memory(300, "decoupled", map_rows, entry_tokens=25)  # an entry lies in two items
    memories = [long, replace(long, adjacent=True), Memory(5)]
    problem = make((3, 1, 64), memories, [1, 2, 0, 3])
    assert int(problem.step(problem.shape(split=True)).work[:, 1].max()) == 256  # three items
    check(problem, split=True)


@pytest.mark.parametrize("form", ["merged", "decoupled"])
def test_one_entry_of_2048_tokens(form: str) -> None:
    """As `inducekv-bundle import` makes it: its tokens are adjacent and its terms neutral."""
    entry = Memory(2048, form, entry_tokens=2048, adjacent=True)
    check(make((2, 1, 16), [entry, Memory(5, form)], [1, 2, 1, 0, 1]), split=True, lse=form == "merged")


@pytest.mark.parametrize("form", ["merged", "decoupled"])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_weights_of_exactly_0_and_1(form: str, weight: float) -> None:
    """As `sqrt` weighting has them (key and value scales), and `prior` (log weights)."""
    prior = Memory(6, form, key_scale=1.0, log_weight=0.0 if weight else -torch.inf, value_scale=1.0)
    root = Memory(6, form, key_scale=weight, log_weight=0.0, value_scale=weight)
    problem = make((2, 1, 64), [prior, root], [1, 2])
    check(problem)
    if not weight:  # nothing of `prior` is left: the self-attention's own bits
        shape, found = problem.shape(), problem.output.clone().to(DEVICE)
        there = problem.to(DEVICE)
        step = there.step(shape)
        launch.add_memory(there.pool, there.tables, step, there.query, found, there.self_lse, SCALE, shape)
        assert same_bits(found[0].cpu(), problem.output[0])


@pytest.mark.parametrize("map_rows", [0, 2])
@pytest.mark.parametrize("form", ["merged", "decoupled"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_what_is_not_finite_is_not_added(dtype: torch.dtype, form: str, map_rows: int) -> None:
    """Such a number of the output stays that of self-attention, to the bit."""
    problem = make((2, 1, 16), [Memory(3, form, map_rows)], [1, 0, 1], dtype).to(DEVICE)
    problem.pool.value_gate.fill_(3e38)
    problem.pool.values.mul_(6e4).clamp_(-6e4, 6e4)
    problem.pool.values[..., :8] = 0
    shape = problem.shape()
    step, rows = problem.step(shape), problem.row_slot != 0
    for add_memory in (launch.add_memory, twin.add_memory):
        found = problem.output.clone()
        add_memory(problem.pool, problem.tables, step, problem.query, found, problem.self_lse, SCALE, shape)
        assert found[rows].isfinite().all()
        assert same_bits(found[..., 8:].cpu(), problem.output[..., 8:].cpu())
        if form == "merged" and not map_rows:  # what is finite is merged all the same
            assert (found[rows][..., :8] != problem.output[rows][..., :8]).all()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rows", [[1, 2, 0], [0, 0]])
def test_an_empty_memory_and_an_idle_plan_change_nothing(split: bool, rows: list[int]) -> None:
    problem = make((2, 1, 64), [Memory(0), Memory(0, "decoupled")], rows).to(DEVICE)
    shape, found = problem.shape(split=split), problem.output.clone()
    launch.add_memory(
        problem.pool, problem.tables, problem.step(shape), problem.query, found, problem.self_lse, SCALE, shape
    )
    assert same_bits(found, problem.output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", ["merged", "decoupled"])
def test_logits_near_overflow(form: str, dtype: torch.dtype) -> None:
    """Products q . k of tens of thousands, near the largest float16; whole numbers, so that these are exact."""
    problem = make((2, 1, 64), [Memory(40, form, key_scale=1.0, log_weight=0.0)], [1, 1, 0], dtype)
    rng = torch.Generator().manual_seed(5)
    keys = torch.randint(-30, 31, problem.pool.keys.shape, generator=rng).to(dtype)
    problem.pool.keys.copy_(torch.where(problem.pool.keys.isnan(), problem.pool.keys, keys))
    problem.query[:2] = torch.randint(-400, 401, (2, 2, 64), generator=rng).to(dtype)
    place = problem.tables.token_index[1, :40].long() + torch.arange(40)
    products = problem.query[0, 0].double() @ problem.pool.keys[0, place].double().T
    assert 5e4 < products.abs().max() < 65504
    problem.self_lse[:2] = products.max() * SCALE if form == "merged" else 0.0
    # A float32 logit x is rounded by up to 2^-24 |x|, and so are its bias and its change of base.
    check(problem, tolerance=3 * 2**-24 * 65504 * SCALE)


@pytest.mark.parametrize(
    ("geometry", "heads", "message"),
    [
        ((2, 1, 12), 2, "multiple of 8 from 16 to 256, found 12"),
        ((2, 1, 264), 2, "found 264"),
        ((4, 2, 64), 5, "found 5 query heads and 2 KV heads"),
        ((4, 2, 64), 258, "found 258 query heads and 2 KV heads"),
        ((2, 1, 592, 520), 2, "latents of a multiple of 8 numbers, up to 512 and 128 .*, found 520 and 72"),
        ((2, 1, 80, 68), 2, "found 68 and 12"),
    ],
)
def test_unsupported_heads_are_refused(geometry: Geometry, heads: int, message: str) -> None:
    problem = make(geometry, [Memory(1)], [1])
    with pytest.raises(ValueError, match=message):
        launch.check(problem.pool, heads)


def test_a_pool_of_another_type_is_refused() -> None:
    problem = make((4, 2, 64), [Memory(1)], [1])
    with pytest.raises(ValueError, match=r"the pool must be .*, found torch\.float64"):
        launch.check(replace(problem.pool, keys=problem.pool.keys.double()), 4)


def far_apart(tensor: Tensor, dim: int, file: Path) -> Tensor:
    """A copy with 2^30 numbers from one index of `dim` to the next: index 4 is 2^32, which 32 bits take for 0.

    It lies in a sparse file: what is between the numbers takes no memory.
    """
    stride = [1 << 30 if d == dim else s for d, s in enumerate(tensor.stride())]
    last = sum((size - 1) * s for size, s in zip(tensor.shape, stride, strict=True))
    numbers = torch.from_numpy(np.memmap(file, tensor.numpy().dtype, mode="w+", shape=last + 1))
    return numbers.as_strided(tensor.shape, stride).copy_(tensor)


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU's memory is not sparse")
@pytest.mark.parametrize("apart", ["pool", "tables", "rows"])
def test_more_numbers_than_32_bits_count(apart: str, tmp_path: Path) -> None:
    memories = [Memory(1), Memory(2, "decoupled", 1), Memory(1), Memory(2, "decoupled", 2, adjacent=True)]
    problem = make((2, 1, 16), memories, [0, 2, 0, 0, 4, 1], torch.float16)
    pool, tables, query, output = problem.pool, problem.tables, problem.query.contiguous(), problem.output
    if apart == "pool":
        places = ("keys", "values", "map_in", "map_out")
        pool = replace(pool, **{name: far_apart(getattr(pool, name), 1, tmp_path / name) for name in places})
    elif apart == "tables":
        wide = ("token_index", "log_weight", "key_scale", "value_scale", "map_index", "map_weight")
        tables = replace(tables, **{name: far_apart(getattr(tables, name), 0, tmp_path / name) for name in wide})
    else:
        query, output = far_apart(query, 0, tmp_path / "query"), far_apart(output, 0, tmp_path / "output")
    launch.check(pool, 2)
    shape, expected = problem.shape(), problem.output.clone()
    step, rest = problem.step(shape), (problem.self_lse, SCALE, shape)
    launch.add_memory(problem.pool, problem.tables, step, problem.query, expected, *rest)
    output.copy_(problem.output)
    launch.add_memory(pool, tables, step, query, output, *rest)
    assert same_bits(output, expected)


def test_variants_are_compiled_side_by_side_for_a_gpu_that_is_not_there() -> None:
    """In a process of its own, where nothing is interpreted."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", FAKE_GPU + COMPILED], env=environment, capture_output=True, text=True)
    assert run.stdout.split() == ["0", "2"], run.stdout + run.stderr


def test_a_launch_passes_what_tritons_own_passes() -> None:
    """To a GPU that is not there; also where another call finds what was compiled before."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", FAKE_GPU + LAUNCHED], env=environment, capture_output=True, text=True)
    assert run.stdout.split() == ["8", "True", "True"], run.stdout + run.stderr


FAKE_GPU = """
import torch
from benchmarks.kernels.launching import without_gpu
from inducekv_vllm.attention.kernels import device, launch
from inducekv_vllm.attention.kernels.layout import StepTensors
from inducekv_vllm.attention.kernels.tiles import idle_plan
from tests.unit.inducekv_vllm.attention.kernels.problems import Memory, make

launched = []
without_gpu(lambda *given: launched.append(given))
kernels = device.memory_tiles.device_caches[0][0]
"""
COMPILED = """
problem = make((2, 1, 16), [Memory(1), Memory(2, "decoupled")], [1, 2], torch.float16)
print(len(kernels))
launches = []
for lse in (False, True):
    shape = problem.shape(lse=lse)
    step = StepTensors.from_plan(idle_plan(shape), 1, "cpu")
    rest = problem.query, problem.output, problem.self_lse, 1.0, shape
    launches.append(launch.arguments_of(problem.pool, problem.tables, step, *rest))
launch.compile_all(launches)
print(sum(kernel.asm["cubin"][:4] == b"\\x7fELF" for kernel in kernels.values()))
"""
LAUNCHED = """
problem = make((2, 1, 16), [Memory(1), Memory(2, "decoupled")], [1, 2, 0, 2], torch.float16)
shape = problem.shape()
step = StepTensors.from_plan(idle_plan(shape), 1, "cpu")
of_prompts = torch.randn(4, 2), torch.randn(2, 4).T, torch.randn(2, 6).T[1:5]  # strides of all kinds
for self_lse in (problem.self_lse, *of_prompts):
    given = problem.pool, problem.tables, step, problem.query, problem.output, self_lse, 0.5, shape
    device.memory_tiles[shape.programs, 1](**launch.arguments_of(*given))
    launch.add_memory(*given)
print(len(launched), len(kernels) == len(problem.pool.compiled))
alike = lambda own, ours: own is ours or (type(own) is not torch.Tensor and own == ours)
print(all(all(map(alike, own, ours)) for own, ours in zip(launched[::2], launched[1::2])))
"""
