"""What only a GPU can show: graphs, and that a step of another size compiles nothing."""

import pytest
import torch

from benchmarks.geometries import GEOMETRIES
from benchmarks.kernels import replay
from benchmarks.kernels.workloads import Case, build
from inducekv_vllm.attention.kernels import device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("geometry", ["tiny", "qwen3-vl-4b"])
def test_a_graph_is_replayed_over_changing_steps(geometry: str, dtype: torch.dtype) -> None:
    rows = replay.measure(GEOMETRIES[geometry], dtype, "cuda", print, timed=True)
    assert [row for row in rows if not row["right"]] == []
    assert len({row["rows_with_memory"] for row in rows}) > 2


def test_steps_of_other_sizes_compile_nothing() -> None:
    """Each kind of launch is compiled once; a server does that at its start."""
    compiled = device.memory_tiles.device_caches[torch.cuda.current_device()][0]
    before, kinds = len(compiled), set()
    for rows in (2048, 2047, 1025, 4096, 4095, 20_000, 20_001):
        workload = build(Case("prefill", rows, 4, "merged"), GEOMETRIES["tiny"], torch.bfloat16, "cuda")
        workload.add_memory(workload.self_output)
        kinds.add(workload.shape.kind)
    assert len(compiled) - before <= len(kinds) < 7
