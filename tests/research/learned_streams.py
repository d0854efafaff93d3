"""Streams of two tasks that any method of the benchmark learns in seconds."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchmarks.research.continual.methods import METHODS, Artifact, Method, RunContext, choose_methods
from benchmarks.research.continual.methods.memory import BUNDLE
from benchmarks.research.continual.suites import Suite
from inducekv_vllm.bundle import Bundle, read_bundle

BUDGET, M = 4, 2
NUM_TASKS = 4  # of the whole stream, so that the bytes of a share and of the whole differ
TEXT_ALONE = "matched_memory"  # the demo world has pictures
MEMORIES = [name for name, method in METHODS.items() if method.kind == "bundle" and name != TEXT_ALONE]
RIVALS = [name for name in METHODS if name not in (*MEMORIES, TEXT_ALONE)]

FEW_STEPS = ["steps=2", "batch_size=4", "anchors_per_task=5"]
FEW_ENTRIES = [f"payload_tokens={M}", "entries_per_task=2", "iterations=2", "inner_steps=1", "learning_rate=0.1"]
# Every method with less to do; what makes it an ablation stays.
SMALL: dict[str, Method] = {
    method.name: method
    for method in (
        *choose_methods(RIVALS, [*FEW_STEPS, "fisher_examples=6", "experts=2"]),
        *choose_methods(MEMORIES, [*FEW_STEPS, *FEW_ENTRIES]),
    )
}


@dataclass
class LearnedStream:
    """Learns two tasks, one after the other, into an empty folder."""

    method: Method
    model: Path
    suite: Suite
    folder: Path
    artifacts: list[Artifact] = field(init=False)

    def __post_init__(self) -> None:
        first, second = self.states
        self.artifacts = [self.learn(0, None, first), self.learn(1, first, second)]

    @property
    def states(self) -> list[Path]:
        return [self.folder / "0", self.folder / "1"]

    @cached_property
    def bundles(self) -> list[Bundle]:
        """Of a memory method."""
        return [read_bundle(state / BUNDLE) for state in self.states]

    def context(self, number: int) -> RunContext:
        return RunContext(self.model, BUDGET, 0, number, NUM_TASKS, self.suite.base.train)

    def learn(self, number: int, previous: Path | None, out: Path) -> Artifact:
        out.mkdir()
        return self.method.learn(self.suite.tasks[number], previous, out, self.context(number))
