"""What the worker is told of a step by fake model runners of both kinds: its rows, and the graph that it replays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.config import CUDAGraphMode

from inducekv_vllm.host.runner import StepRows, follow_runner

SCHEDULED = SimpleNamespace(num_scheduled_tokens={"b": 1, "a": 3})
ROWS = StepRows(["a", "b"], [5, 9], [3, 1])


class V1:
    """Runs a step as `GPUModelRunner.execute_model` does: inputs first, then the choice of a graph."""

    def __init__(self, mode: CUDAGraphMode) -> None:
        self.mode = mode
        self.input_batch = SimpleNamespace(req_ids=["a", "b"], num_computed_tokens_cpu=np.array([5, 9, 7]))

    def _prepare_inputs(self, scheduled: Any, num_scheduled: Any) -> str:
        return "prepared"

    def _determine_batch_execution_and_padding(self, *, num_tokens: int) -> tuple[Any, ...]:
        return self.mode, SimpleNamespace(num_tokens=8), False, None, None

    def step(self) -> None:
        assert self._prepare_inputs(SCHEDULED, np.array([3, 1])) == "prepared"
        self.dummy_run()

    def dummy_run(self) -> None:
        assert self._determine_batch_execution_and_padding(num_tokens=4)[1].num_tokens == 8


class V2:
    """Chooses the graph before it prepares the inputs."""

    def __init__(self, mode: CUDAGraphMode) -> None:
        self.graph = SimpleNamespace(cg_mode=mode, num_tokens=8)

    def prepare_inputs(self, scheduled: Any, state: Any, graph: Any, num_active_loras: int) -> Any:
        computed, rows = np.array([5, 9]), np.array([3, 1])
        return SimpleNamespace(req_ids=["a", "b"], num_computed_tokens_np=computed, num_scheduled_tokens=rows)

    def step(self) -> None:
        assert self.prepare_inputs(SCHEDULED, None, self.graph, 0).req_ids == ["a", "b"]

    def dummy_run(self) -> None:
        """Prepares other inputs."""


@pytest.mark.parametrize("kind", [V1, V2])
@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
def test_a_step_is_told_once_with_its_graph(kind: type, mode: CUDAGraphMode) -> None:
    told: list[StepRows] = []
    runner = kind(mode)
    follow_runner(runner, kind is V2, told.append)
    runner.dummy_run()
    assert told == []
    for _ in range(2):
        runner.step()
        runner.dummy_run()
    graph_rows = 8 if mode == CUDAGraphMode.FULL else None
    assert told == 2 * [StepRows(ROWS.request_ids, ROWS.num_computed, ROWS.num_scheduled, graph_rows)]
