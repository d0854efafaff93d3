"""What all memory methods share: a task's state is a bundle and the anchors of all tasks so far.

A method is served as its bundle, by the plugin, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.continual.methods.method import Artifact, Circumstances
from benchmarks.continual.methods.rehearsal import earlier_anchors, keep_anchors
from benchmarks.continual.suites import TaskData
from inducekv_vllm.bundle import read_bundle, write_bundle
from selector.backbone.model import Backbone
from selector.runtime.checkpoint import Checkpoint
from selector.update.inputs import TaskInputs
from selector.update.measures import memory_bytes
from selector.update.result import UpdateResult

BUNDLE = "memory.safetensors"

S = TypeVar("S")


def selector_settings(kind: type[S], method: Any, circumstances: Circumstances) -> S:
    """The settings of the selector: the method's fields of the same names, with the run's budget and seed.

    Raises:
        ConfigError: a value is out of range.
    """
    shared = {field.name for field in fields(kind)} & {field.name for field in fields(method)}  # type: ignore[arg-type]
    given = {name: getattr(method, name) for name in sorted(shared)}
    return kind(budget=circumstances.budget, seed=circumstances.seed, **given)


def learn_memory(
    update: Callable[[Backbone, TaskInputs, Checkpoint], UpdateResult],
    anchors_per_task: int,
    task: TaskData,
    previous: Path | None,
    out: Path,
    circumstances: Circumstances,
) -> Artifact:
    """One task's update from the bundle and the anchors in `previous`; the next ones go into `out`."""
    backbone = Backbone.load(circumstances.model)
    anchors = earlier_anchors(previous, out)
    before = None if previous is None else read_bundle(previous / BUNDLE)
    # Nothing to go on from: the folder is new, and what an attempt that was killed has left is gone.
    checkpoint, _ = Checkpoint.open(out / "progress", {})
    done = update(backbone, TaskInputs(task.train, task.validation, anchors, before), checkpoint)
    checkpoint.remove()
    write_bundle(done.bundle, out / BUNDLE)
    anchor_bytes = keep_anchors(task.name, task.train, out, anchors_per_task, circumstances.seed)
    report = {name: value for name, value in done.report.items() if name != "diversity"}
    report |= report.pop("refinement", {}) | {"anchor_bytes": anchor_bytes}
    return Artifact("bundle", BUNDLE, memory_bytes(done.bundle), report)
