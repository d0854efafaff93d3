"""Shared by the selector's recipes: a task's state is a bundle, which the plugin serves, and anchors of all tasks."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from benchmarks.research.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.research.continual.methods.rehearsal import earlier_anchors, keep_anchors
from benchmarks.research.continual.suites import TaskData
from inducekv_vllm.bundle import read_bundle, write_bundle
from selector.backbone.model import Backbone
from selector.runtime.checkpoint import Checkpoint
from selector.runtime.settings import Settings
from selector.update.inputs import TaskInputs
from selector.update.measures import memory_bytes
from selector.update.result import UpdateResult

BUNDLE = "memory.safetensors"

S = TypeVar("S", bound=Settings)


class SelectedMemory:
    """Learns each task by one update of the selector, from the bundle and the anchors of the state before."""

    kind: ClassVar[Kind] = "bundle"
    anchors_per_task: int

    def update(
        self, backbone: Backbone, inputs: TaskInputs, checkpoint: Checkpoint, context: RunContext
    ) -> UpdateResult:
        raise NotImplementedError

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        backbone = Backbone.load(context.model)
        anchors = earlier_anchors(previous, out)
        before = None if previous is None else read_bundle(previous / BUNDLE)
        # There is nothing to resume: the folder is new, and the leftovers of a killed attempt are gone.
        checkpoint, _ = Checkpoint.open(out / "progress", {})
        result = self.update(backbone, TaskInputs(task.train, task.validation, anchors, before), checkpoint, context)
        checkpoint.remove()
        write_bundle(result.bundle, out / BUNDLE)
        anchor_bytes = keep_anchors(task.name, task.train, out, self.anchors_per_task, context.seed)
        report = dict(result.report)
        report |= report.pop("refinement", {}) | {"anchor_bytes": anchor_bytes}
        return Artifact("bundle", BUNDLE, memory_bytes(result.bundle), report)


def selector_settings(kind: type[S], method: Any, context: RunContext) -> S:
    """The settings of the selector: the method's fields of the same names, with the run's budget and seed."""
    shared = kind.model_fields.keys() & {field.name for field in fields(method)}
    values = {name: getattr(method, name) for name in sorted(shared)}
    return kind(budget=context.budget, seed=context.seed, **values)
