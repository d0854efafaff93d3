"""What captures and replays CUDA graphs in vLLM's two model runners."""

from types import SimpleNamespace
from typing import Any

from vllm.config import CUDAGraphMode


class RunnerV2:
    """As vLLM's: its manager captures one graph for each shape, and none twice."""

    def __init__(self) -> None:
        shapes = {CUDAGraphMode.PIECEWISE: ["mixed"], CUDAGraphMode.FULL: [4, 8]}
        self.cudagraph_manager: Any = SimpleNamespace(graphs={}, _capture_descs=shapes, capture=self.capture)
        self.state, self.pieces = "", 0

    def capture(self, *, name: str) -> None:
        assert name == "as given"
        manager = self.cudagraph_manager
        self.pieces += len(manager._capture_descs.get(CUDAGraphMode.PIECEWISE, []))
        for shape in manager._capture_descs.get(CUDAGraphMode.FULL, []):
            assert shape not in manager.graphs
            manager.graphs[shape] = f"{self.state}, {shape} rows"

    def capture_all(self) -> None:
        self.cudagraph_manager.capture(name="as given")

    def replay(self, shape: int) -> str:
        return str(self.cudagraph_manager.graphs[shape])


class RunnerV1:
    """As vLLM's: it captures a graph where its model finds none."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(concrete_cudagraph_entries={})
        self.state, self.pieces = "", 0

    def _capture_cudagraphs(self, batch_descriptors: list[int], cudagraph_runtime_mode: CUDAGraphMode) -> None:
        if cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE:
            self.pieces += len(batch_descriptors)
        else:
            for shape in batch_descriptors:
                self.model.concrete_cudagraph_entries.setdefault(shape, f"{self.state}, {shape} rows")

    def capture_all(self) -> None:
        self._capture_cudagraphs([1], cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
        self._capture_cudagraphs([4], cudagraph_runtime_mode=CUDAGraphMode.FULL)
        self._capture_cudagraphs([8], cudagraph_runtime_mode=CUDAGraphMode.FULL)

    def replay(self, shape: int) -> str:
        return str(self.model.concrete_cudagraph_entries[shape])
