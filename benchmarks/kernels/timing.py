"""Times under CUDA graphs, and what the device can do at best. Times are microseconds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

ROUNDS = 7
LEAST_SECONDS = 0.01  # of a round
MATRIX = 8192
COPIED_BYTES = 1 << 32


@dataclass(frozen=True)
class Peaks:
    """Of one device: bytes read and written, and operations in a dtype, per second; a kernel that does nothing."""

    bytes_per_second: float
    operations_per_second: float
    launch_us: float  # of one element's addition, in a graph of many

    def roofline_us(self, moved: int, operations: int) -> float:
        return 1e6 * max(moved / self.bytes_per_second, operations / self.operations_per_second)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def measure_peaks(dtype: torch.dtype) -> Peaks:
    source, target = (torch.empty(COPIED_BYTES // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda").to(dtype) for _ in range(2))
    number = torch.zeros(1, device="cuda")
    return Peaks(
        bytes_per_second=COPIED_BYTES / microseconds([partial(target.copy_, source)]) * 1e6,
        operations_per_second=2 * MATRIX**3 / microseconds([partial(torch.mm, left, right)]) * 1e6,
        launch_us=microseconds([partial(number.add_, 1.0)] * 100),
    )


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """The mean time of the calls, which are captured into one graph one after the other; the median over rounds."""
    graph = capture(calls)
    replays = max(1, int(LEAST_SECONDS / max(_replay_seconds(graph, 1), 1e-6)))
    rounds = [_replay_seconds(graph, replays) for _ in range(ROUNDS)]
    return 1e6 * statistics.median(rounds) / len(calls)


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of the calls, after each has run once, so that kernels are compiled and chosen."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay_seconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Of one replay."""
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / replays
