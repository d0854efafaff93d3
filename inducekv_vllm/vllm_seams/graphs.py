"""vLLM's complete CUDA graphs, captured once for each kind of step: which is replayed, the step says.

Both model runners keep them in a dict, by the shape of a batch. Here each kind has a dict of its own, and the runner
finds the one that was chosen. Piecewise graphs leave attention out, so one of each shape is enough.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar

from vllm.config import CUDAGraphMode

from .patches import patch

FULL: Final = CUDAGraphMode.FULL
Kind = TypeVar("Kind")


class GraphSets(Generic[Kind]):
    """The graphs of a runner that has its KV cache, and has captured none yet."""

    def __init__(self, runner: Any, is_v2: bool, kinds: Sequence[Kind], prepare: Callable[[Kind], None]) -> None:
        """`prepare` is called before the graphs of a kind are captured, and at the end with the first kind."""
        self._graphs: dict[Kind, dict[Any, Any]] = {kind: {} for kind in kinds}
        self._prepare = prepare
        self._keep: Callable[[dict[Any, Any]], None] = (self._follow_v2 if is_v2 else self._follow_v1)(runner)

    def choose(self, kind: Kind) -> None:
        """The next graph that is replayed or captured is of this kind."""
        self._keep(self._graphs[kind])

    def _follow_v2(self, runner: Any) -> Callable[[dict[Any, Any]], None]:
        manager = runner.cudagraph_manager
        capture, shapes = manager.capture, manager._capture_descs

        def capture_each(*args: Any, **kwargs: Any) -> None:
            for kind in self._in_turn():
                is_first = kind == next(iter(self._graphs))
                manager._capture_descs = shapes if is_first else {FULL: shapes.get(FULL, [])}
                capture(*args, **kwargs)
            manager._capture_descs = shapes

        manager.capture = capture_each
        return partial(_keep, manager, "graphs")

    def _follow_v1(self, runner: Any) -> Callable[[dict[Any, Any]], None]:
        capture = runner._capture_cudagraphs

        def capture_each(batch_descriptors: Any, cudagraph_runtime_mode: Any, *args: Any, **kwargs: Any) -> None:
            for _ in self._in_turn() if cudagraph_runtime_mode == FULL else [None]:
                capture(batch_descriptors, cudagraph_runtime_mode, *args, **kwargs)

        runner._capture_cudagraphs = capture_each
        return partial(_keep, runner.model, "concrete_cudagraph_entries")

    def _in_turn(self) -> Iterator[Kind]:
        """Each kind, prepared and chosen; then the first one again."""
        for kind in self._graphs:
            self._take(kind)
            yield kind
        self._take(next(iter(self._graphs)))

    def _take(self, kind: Kind) -> None:
        self._prepare(kind)
        self.choose(kind)


def _keep(owner: Any, name: str, graphs: dict[Any, Any]) -> None:
    """Let the runner find its graphs in this dict."""
    patch(owner, name, lambda _: graphs)
