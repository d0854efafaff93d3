"""The rivals that are most like the memory: adapters behind its relevance gate.

A question that the gate judges to be none of the stream's is answered by the untouched model. The gate is fitted to
what the refined recipe's is: anchors of every task, the arriving task's training and validation questions, and base
questions. Its bytes and the adapters' together are no more than the memory's with its gate.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.continual.methods.adapter import memory_bytes
from benchmarks.continual.methods.gating import GATE, gate_of, write_gate
from benchmarks.continual.methods.lora import ADAPTER, Lesson, Lora
from benchmarks.continual.methods.lora_replay import LoraReplay
from benchmarks.continual.methods.method import Artifact, Circumstances, Kind
from benchmarks.continual.methods.rehearsal import ANCHORS, earlier_anchors, keep_anchors
from benchmarks.continual.suites import TaskData
from selector.backbone.model import Backbone
from selector.data.anchors import AnchorStore
from selector.data.examples import Example

ADAPTERS = "adapters"


@dataclass(frozen=True)
class GatedLoraReplay(LoraReplay):
    """LoRA + replay: one adapter for all tasks, where the gate is open."""

    kind: ClassVar[Kind] = "gated_adapter"
    name: str = "gated_lora_replay"
    base: bool = True  # whether the gate is shown base questions

    def bytes_allowed(self, backbone: Backbone, circumstances: Circumstances) -> int:
        return memory_bytes(backbone, circumstances.budget, self.payload_tokens, gated_tasks=0)

    def learn(self, task: TaskData, previous: Path | None, out: Path, circumstances: Circumstances) -> Artifact:
        learnt = super().learn(task, previous, out, circumstances)
        return gated(learnt, "gated_adapter", task, out, circumstances, self.base)


@dataclass(frozen=True)
class GatedTaskLora(Lora):
    """A LoRA of its own for each task, never changed afterwards, and chosen by the gate: it cannot forget.

    The mirror of the memory's quota for each task: a task's share of the bytes is the memory's, divided by the tasks of
    the whole stream. For the demo model and eight tasks that is rank 1 at budget 32 and rank 3 at budget 64. A budget
    that does not even allow rank 1 is refused.
    """

    kind: ClassVar[Kind] = "gated_adapters"
    name: str = "gated_task_lora"
    anchors_per_task: int = 64  # for the gate alone
    base: bool = True
    learning_rate: float = 3e-3  # so small a rank wants a larger one
    trials: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"learning_rate": 1e-3},
        {"learning_rate": 3e-3},
        {"learning_rate": 1e-2},
    )

    def bytes_allowed(self, backbone: Backbone, circumstances: Circumstances) -> int:
        together = memory_bytes(backbone, circumstances.budget, self.payload_tokens, gated_tasks=0)
        return together // circumstances.num_tasks

    def learn(self, task: TaskData, previous: Path | None, out: Path, circumstances: Circumstances) -> Artifact:
        earlier_anchors(previous, out)
        learnt = super().learn(task, None, out, circumstances)
        if previous is not None:
            shutil.copytree(previous / ADAPTERS, out / ADAPTERS)
        (out / ADAPTERS).mkdir(exist_ok=True)
        (out / ADAPTER).rename(out / ADAPTERS / task.name)
        together = replace(learnt, path=ADAPTERS, stored_bytes=learnt.stored_bytes * (circumstances.number + 1))
        return gated(together, "gated_adapters", task, out, circumstances, self.base)

    def keep(self, lesson: Lesson) -> dict[str, Any]:
        task, seed = lesson.task, lesson.circumstances.seed
        return {"anchor_bytes": keep_anchors(task.name, task.train, lesson.out, self.anchors_per_task, seed)}


def gated(
    learnt: Artifact, kind: Kind, task: TaskData, out: Path, circumstances: Circumstances, base: bool
) -> Artifact:
    """The artifact of a state that holds anchors of all tasks, behind a gate that is fitted and written here."""
    anchors = [anchor for anchor in AnchorStore(out / ANCHORS).read() if anchor.task != task.name]
    shown: tuple[Example, ...] = tuple(circumstances.base) if base else ()
    gate = gate_of(circumstances.model, task, anchors, shown)
    size = write_gate(gate, out / GATE)
    report = learnt.report | {"gate_bytes": size, "gate_thresholds": gate.thresholds.tolist()}
    return Artifact(kind, learnt.path, learnt.stored_bytes + size, report)
