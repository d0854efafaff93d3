"""LoRA + replay: half of every batch are anchors of the tasks before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.continual.methods.lora import AdapterTraining, Lora
from benchmarks.continual.methods.rehearsal import earlier_anchors, keep_anchors
from selector.data.examples import Example


@dataclass(frozen=True)
class LoraReplay(Lora):
    """As many anchors of each task as the memory's own recipe keeps; batches draw from all of them alike."""

    name: str = "lora_replay"
    anchors_per_task: int = 64

    def rehearsed(self, training: AdapterTraining) -> Sequence[Example]:
        return earlier_anchors(training.previous, training.out)

    def keep(self, training: AdapterTraining) -> dict[str, Any]:
        task, seed = training.task, training.context.seed
        return {"anchor_bytes": keep_anchors(task.name, task.train, training.out, self.anchors_per_task, seed)}
