"""CUDA graphs that split long memories: plans that are written to the buffers of a captured launch, by the kernels."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from inducekv_vllm.attention.kernel_step import GraphBuffers, GraphKind
from inducekv_vllm.attention.kernels import launch
from inducekv_vllm.attention.kernels.geometry import KernelGeometry, MemoryRows
from inducekv_vllm.attention.kernels.tiles import Processors
from inducekv_vllm.vllm_seams.device import device_of

from .kernels.problems import SCALE, TOLERANCE, Memory, Problem, by_loops, deviation, make, same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, J, D = 3, 1, 64
SMALL, LARGE = 2, 6  # rows of the two graphs
MEMORIES = [
    Memory(300, remainder=True),
    Memory(300, entries_of=1),
    Memory(5, "decoupled", 3),
    Memory(290, "decoupled", adjacent=True),
]


def geometry(most_tokens: int) -> KernelGeometry:
    return KernelGeometry(J, H // J, D, D, element_size=4, most_tokens=most_tokens, processors=Processors(4))


class Engine:
    """Graphs of two sizes over one pool, captured while no row has memory."""

    def __init__(self) -> None:
        device = device_of(torch.device(DEVICE))
        self.buffers = GraphBuffers(geometry(4096), LARGE, lse=True, device=device)
        self.graphs = {rows: self.buffers.launch(rows, GraphKind.EVERY) for rows in (SMALL, LARGE)}
        self.problem = make((H, J, D), MEMORIES, [1, 2, 3, 4, 1, 2])

    def replay(self, rows: int, slots: Sequence[int]) -> tuple[Problem, Tensor]:
        """A step of some rows in a graph of `rows`, and its result. The rows behind those are padding."""
        padded = torch.tensor([*slots, *[0] * (rows - len(slots))], dtype=torch.int32)
        output = self.problem.output[:rows].clone()
        output[padded == 0] = math.nan
        step = replace(
            self.problem,
            row_slot=padded,
            query=self.problem.query[:rows],
            output=output,
            self_lse=self.problem.self_lse[:rows],
        )
        of_row = np.array(slots, dtype=np.int32)
        found = MemoryRows(
            of_row, step.lengths[: len(slots)] * (of_row > 0), maps=True, merged=True, layers=frozenset({0})
        )
        self.buffers.write(rows, found, GraphKind.EVERY)
        graph, there, result = self.graphs[rows], step.to(DEVICE), output.clone().to(DEVICE)
        rest = (there.self_lse, SCALE, graph.shape)
        launch.add_memory(there.pool, there.tables, graph.tensors, there.query, result, *rest)
        return step, result.cpu()


def check(engine: Engine, rows: int, slots: Sequence[int]) -> None:
    """A step against loops; rows without memory and padding to the bit."""
    step, found = engine.replay(rows, slots)
    live = step.row_slot > 0
    if live.any():
        assert deviation(found, by_loops(step), live) < TOLERANCE[torch.float32]
    assert same_bits(found[~live], step.output[~live])


def items(engine: Engine, rows: int) -> int:
    """The most that a memory of the written plan is shared out to."""
    return int(engine.graphs[rows].tensors.tile_work.diff().max())


def test_long_and_short_memories_in_graphs_that_split() -> None:
    engine = Engine()
    check(engine, LARGE, [1, 0, 2, 3, 4])
    assert items(engine, LARGE) == 2  # three memories of some 300 tokens, for eight programs
    check(engine, SMALL, [3])  # short alone
    assert items(engine, SMALL) == 1
    check(engine, SMALL, [0, 4])
    check(engine, LARGE, [0, 0, 0])
    for length, parts in ((5, 1), (300, 3), (140, 2)):  # slots are written anew
        engine.problem.tables.length[1:3] = length
        check(engine, SMALL, [1, 2])
        assert items(engine, SMALL) == parts


def test_graphs_read_addresses_that_do_not_change() -> None:
    engine = Engine()
    addresses = [tensor.data_ptr() for tensor in engine.graphs[LARGE].tensors.plan]
    engine.replay(LARGE, [1, 4, 3])
    again = engine.buffers.launch(LARGE, GraphKind.EVERY)
    assert [tensor.data_ptr() for tensor in again.tensors.plan] == addresses
    assert all(address % 16 == 0 for address in addresses)  # kernels are compiled for that
    assert again.shape == engine.graphs[LARGE].shape
