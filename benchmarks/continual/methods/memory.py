"""What all memory methods share: a task's state is a bundle and the anchors of all tasks so far.

A method is served as its bundle, by the plugin, and by nothing else.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.continual.suites import TaskData
from inducekv_vllm.bundle import read_bundle, write_bundle
from selector.anchors import AnchorStore, choose_anchors
from selector.backbone import Backbone
from selector.checkpoint import Checkpoint
from selector.update import TaskInputs, Update, memory_bytes

from .method import Artifact, Circumstances

BUNDLE, ANCHORS = "memory.safetensors", "anchors"

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
    update: Callable[[Backbone, TaskInputs, Checkpoint], Update],
    anchors_per_task: int,
    task: TaskData,
    previous: Path | None,
    out: Path,
    circumstances: Circumstances,
) -> Artifact:
    """One task's update from the bundle and the anchors in `previous`; the next ones go into `out`."""
    backbone = Backbone.load(circumstances.model)
    if previous is not None:
        shutil.copytree(previous / ANCHORS, out / ANCHORS)
    store = AnchorStore(out / ANCHORS)
    before = None if previous is None else read_bundle(previous / BUNDLE)
    # Nothing to go on from: the folder is new, and what an attempt that was killed has left is gone.
    checkpoint, _ = Checkpoint.open(out / "progress", {})
    done = update(backbone, TaskInputs(task.train, task.validation, store.read(), before), checkpoint)
    checkpoint.remove()
    write_bundle(done.bundle, out / BUNDLE)
    seed = circumstances.seed
    rows = choose_anchors(task.train, anchors_per_task, "random", seed, keys=done.training_keys)
    store.append([task.train[row] for row in rows], run=task.name, policy="random", seed=seed)
    report = {name: value for name, value in done.report.items() if name != "diversity"}
    report |= report.pop("refinement", {}) | {"anchor_bytes": store.bytes()}
    return Artifact("bundle", BUNDLE, memory_bytes(done.bundle), report)
