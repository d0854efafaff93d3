"""LoRA with examples of earlier tasks in half of every batch.

LoRA + replay keeps a fixed number of anchors of each task. ER + replay is experience replay with a reservoir (Chaudhry
et al., 2019, "On Tiny Episodic Memories"): a buffer of a fixed size, which is a uniform sample of all examples of the
stream so far, so that the share of each task falls with every new task. The buffer's bytes are matched to the memory's
(the paper's rule for rehearsal), and so are the adapter's (its rule for PEFT); inference needs the adapter alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.continual.methods.lora import AdapterTraining, Lora
from benchmarks.continual.methods.rehearsal import content_bytes, earlier_anchors, keep_anchors, reservoir
from selector.data.anchors import AnchorStore
from selector.data.examples import Example

BUFFER = "buffer"


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


@dataclass(frozen=True)
class ErReplay(Lora):
    """A reservoir buffer."""

    name: str = "er_replay"

    def rehearsed(self, training: AdapterTraining) -> Sequence[Example]:
        return [] if training.previous is None else AnchorStore(training.previous / BUFFER).read()

    def keep(self, training: AdapterTraining) -> dict[str, Any]:
        allowed = self.bytes_allowed(training.scorer.backbone, training.context)
        seed = training.context.seed
        buffer = reservoir(self.rehearsed(training), training.task.train, allowed, seed)
        store = AnchorStore(training.out / BUFFER)
        for task in sorted({example.task for example in buffer}):
            store.append([e for e in buffer if e.task == task], run=task, policy="random", seed=seed)
        return {"buffer": len(buffer), "buffer_bytes": sum(map(content_bytes, buffer)), "buffer_bytes_allowed": allowed}
