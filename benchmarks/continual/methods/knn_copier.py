"""The sanity floor: copies the most common answer of the nearest stored questions. No model answers anything.

Query keys and answers are stored within the bytes of the memory, in equal shares for all tasks of the stream. A method
that is not better has learned no more than to look up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.continual.methods.adapter import memory_bytes
from benchmarks.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.continual.methods.neighbours import Neighbours, drawn, key_bytes
from benchmarks.continual.methods.prompt_replay import KEYS
from benchmarks.continual.suites import TaskData
from selector.backbone.extraction import extract_keys
from selector.backbone.model import Backbone


@dataclass(frozen=True)
class KnnCopier:
    """k-nearest-neighbour answers."""

    kind: ClassVar[Kind] = "copier"
    name: str = "knn_copier"
    k: int = 5
    payload_tokens: int = 8  # m of the memory whose bytes may be taken
    trials: ClassVar[tuple[Mapping[str, Any], ...]] = ({"k": 1}, {"k": 5}, {"k": 15})

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        backbone = Backbone.load(context.model)
        allowed = memory_bytes(backbone, context.budget, self.payload_tokens, context.num_tasks)
        sizes = [key_bytes(backbone.hidden_size) + len(example.answer.encode()) for example in task.train]
        seed = (context.seed, context.number)
        kept = drawn(task.train, sizes, allowed // context.num_tasks, seed)
        before = Neighbours.read(previous / KEYS) if previous else Neighbours.none(backbone.hidden_size, self.k)
        keys = extract_keys(backbone, kept, batch_size=64)
        neighbours = before.after(keys, [example.answer for example in kept])
        neighbours.write(out / KEYS)
        report = {"examples": len(neighbours), "of_this_task": len(kept), "bytes_allowed": allowed}
        return Artifact("copier", KEYS, neighbours.stored_bytes, report)
