"""CUDA graphs are captured once for each kind of step, and each step replays its own, on both model runners."""

from typing import Any

import pytest
from vllm.config import CUDAGraphMode

from inducekv_vllm.vllm_seams.graphs import GraphSets
from tests.engine.graph_runners import RunnerV1, RunnerV2

KINDS = ("none", "some", "all")


@pytest.mark.parametrize("runner", [RunnerV1(), RunnerV2()], ids=["V1", "V2"])
def test_each_kind_has_a_graph_of_every_shape(runner: Any) -> None:
    def prepare(kind: str) -> None:
        runner.state = kind

    sets = GraphSets(runner, isinstance(runner, RunnerV2), KINDS, prepare)
    runner.capture_all()
    assert runner.pieces == 1
    assert runner.state == "none"
    assert runner.replay(4) == "none, 4 rows"  # until a step chooses
    for kind in (*KINDS, "none"):
        sets.choose(kind)
        assert [runner.replay(shape) for shape in (4, 8)] == [f"{kind}, 4 rows", f"{kind}, 8 rows"]
    if isinstance(runner, RunnerV2):
        assert list(runner.cudagraph_manager._capture_descs) == [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL]
