"""What memory adds to a step: copies to the GPU, launches, and waits. docs/gpu.md has the table.

The runner, the device and the kernels are stand-ins; who copies, launches and waits is the worker's own code.
"""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from inducekv_vllm.attention.kernel_step import GraphKind
from inducekv_vllm.attention.slots import ActingRows
from inducekv_vllm.vllm_seams.device import CpuDevice, HostCopy
from inducekv_vllm.vllm_seams.graphs import GraphSets
from tests.engine.attention.memory_world import SCALE, SHAPE, World, rows_of, tensors
from tests.engine.graph_runners import RunnerV1, RunnerV2
from tests.unit.inducekv_vllm.attention.pools import full_attention

DOCS = Path(__file__).parents[3] / "docs" / "gpu.md"
ROWS = 4  # of a step, and of the stand-ins' smaller graph
# Of each step's memories: number in `World`, and round.
STEPS: dict[str, list[tuple[int, int]]] = {
    "no memory": [],
    "decoupled memory": [(1, 0), (2, 0)],
    "merged memory": [(0, 0)],
    "two memories in a request": [(1, 0), (2, 1)],
}
# Copies and launches a layer; with whole graphs, copies of a step that is like the one before, too.
BY_ITSELF = {
    "no memory": (0, 0),
    "decoupled memory": (1, 1),
    "merged memory": (1, 1),
    "two memories in a request": (2, 2),
}
IN_GRAPHS = {
    "no memory": (0, 0, 0),
    "decoupled memory": (1, 0, 1),
    "merged memory": (1, 0, 1),
    "two memories in a request": (2, 0, 2),
}


class Counted(CpuDevice):
    """Counts what a GPU would be asked for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.found: Counter[str] = Counter()

    def write(self, target: Tensor, source: Tensor) -> None:
        self.found["copies"] += 1
        super().write(target, source)

    def upload(self, tensor: Tensor) -> Tensor:
        self.found["copies"] += 1
        return super().upload(tensor)

    def to_host(self, tensor: Tensor) -> HostCopy:
        self.found["waits"] += 1
        return super().to_host(tensor)

    def beside_steps(self) -> AbstractContextManager[object]:
        self.found["waits"] += 1
        return nullcontext()


class Step:
    """A worker's steps of one kind: L layers, each with self-attention that these calls are around."""

    def __init__(self, name: str, runner: Any) -> None:
        self.device, self.runner, self.memories = Counted(), runner, STEPS[name]
        self.world = World(self._launched, map_rank=0, device=self.device, most_memories=2)
        self.attention = self.world.attention
        self.attention.attach(full_attention(), {}, [])
        if runner is not None:
            sets = GraphSets(runner, isinstance(runner, RunnerV2), self.attention.graph_kinds, self._capture)
            self.attention._choose_graphs = sets.choose
            runner.capture_all()

    def run(self) -> Counter[str]:
        """What a step asks for; where it is a graph, what was captured for the replayed one is asked for again."""
        self.device.found.clear()
        half, acting = ROWS // 2, []
        for at, (number, turn) in enumerate(self.memories):
            begin = 0 if turn else at * half  # memories of one round act on rows of their own
            acting.append(ActingRows(self.world.memories[number], at, begin, begin + half, turn))
        rows = rows_of([(None, 0, 5, 1)] * ROWS, ROWS if self.runner is not None else None)
        self.attention.begin_step(rows, acting)
        if self.runner is not None:
            replayed = GraphKind[self.runner.replay(ROWS).split(",")[0]]
            self.attention._in_step = False
            self.attention.capture_for(replayed)
        for layer in range(SHAPE.num_layers):
            query, output, lse = tensors(ROWS)
            self.attention.add(layer, query, output, lse if self.attention.needs_lse(ROWS) else None, SCALE)
        self.attention.end_step()
        return Counter(self.device.found)

    def _launched(self, *_: Any) -> None:
        self.device.found["launches"] += 1

    def _capture(self, kind: GraphKind) -> None:
        self.attention.capture_for(kind)
        self.runner.state = kind.name


@pytest.mark.parametrize("name", STEPS)
def test_a_step_by_itself(name: str) -> None:
    """Eager, or with attention outside of piecewise graphs: the worker does the same in both."""
    step = Step(name, None)
    for _ in range(2):
        found = step.run()
        assert per_layer(found) == BY_ITSELF[name]


@pytest.mark.parametrize("runner", [RunnerV1, RunnerV2])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_in_whole_graphs(name: str, runner: Any) -> None:
    step = Step(name, runner())
    first, again = step.run(), step.run()
    assert (first["copies"], *per_layer(again)) == IN_GRAPHS[name]
    first["copies"] = again["copies"]
    assert first == again


def per_layer(found: Counter[str]) -> tuple[int, int]:
    """Copies, and launches a layer; nothing waits."""
    assert found["waits"] == 0
    assert found["launches"] % SHAPE.num_layers == 0
    return found["copies"], found["launches"] // SHAPE.num_layers


def test_the_page_has_these_counts() -> None:
    page = DOCS.read_text()
    for name, (copies, launches) in BY_ITSELF.items():
        row = f"| {name} | {copies} | {launches} | " + " | ".join(map(str, IN_GRAPHS[name])) + " |"
        assert row in page, row
