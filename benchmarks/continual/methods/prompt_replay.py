"""PromptReplay: exemplars of the tasks stand before the question as earlier turns (paper, "Compute-Matched Retrieval").

Stored are exemplars with their pictures and their query keys, within the bytes of the memory, in equal shares for all
tasks of the stream; the model stays as it is. Before a question stand the nearest exemplars by the paper's query key,
the nearest last, as many as the model's context holds.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.continual.methods.adapter import memory_bytes
from benchmarks.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.continual.methods.neighbours import Neighbours, drawn, key_bytes
from benchmarks.continual.methods.rehearsal import content_bytes
from benchmarks.continual.suites import TaskData
from selector.backbone.extraction import extract_keys
from selector.backbone.model import Backbone
from selector.data.anchors import AnchorStore

EXEMPLARS, KEYS = "exemplars", "keys.safetensors"


@dataclass(frozen=True)
class PromptReplay:
    """Retrieved exemplars in the prompt."""

    kind: ClassVar[Kind] = "exemplars"
    name: str = "prompt_replay"
    shown: int = 4  # exemplars before a question
    payload_tokens: int = 8  # m of the memory whose bytes may be taken
    trials: ClassVar[tuple[Mapping[str, Any], ...]] = ({"shown": 1}, {"shown": 4}, {"shown": 8})

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        backbone = Backbone.load(context.model)
        allowed = memory_bytes(backbone, context.budget, self.payload_tokens, context.num_tasks)
        sizes = [content_bytes(example) + key_bytes(backbone.hidden_size) for example in task.train]
        seed = (context.seed, context.number)
        kept = drawn(task.train, sizes, allowed // context.num_tasks, seed)
        if previous is not None:
            shutil.copytree(previous / EXEMPLARS, out / EXEMPLARS)
        store = AnchorStore(out / EXEMPLARS)
        store.append(kept, run=task.name, policy="random", seed=context.seed)
        before = Neighbours.read(previous / KEYS) if previous else Neighbours.none(backbone.hidden_size, self.shown)
        neighbours = before.after(extract_keys(backbone, kept, batch_size=64))
        neighbours.write(out / KEYS)
        stored = neighbours.stored_bytes + sum(map(content_bytes, store.read()))
        report = {"exemplars": len(neighbours), "of_this_task": len(kept), "bytes_allowed": allowed}
        return Artifact("exemplars", EXEMPLARS, stored, report)
