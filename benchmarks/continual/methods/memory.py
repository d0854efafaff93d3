"""InduceKV itself: the next bundle of the stream, as `inducekv-select` makes it by one of its recipes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from benchmarks.continual.suites import TaskData
from inducekv_vllm.bundle import read_bundle, write_bundle
from selector.anchors import AnchorStore, choose_anchors
from selector.backbone import Backbone
from selector.checkpoint import Checkpoint
from selector.refined_update import RefinedSettings, update_refined
from selector.update import TaskInputs, memory_bytes

from .method import Artifact, Circumstances, Kind

BUNDLE, ANCHORS = "memory.safetensors", "anchors"


@dataclass(frozen=True)
class Refined:
    """The refined recipe, with its own defaults."""

    kind: ClassVar[Kind] = "bundle"
    name: str = "refined"
    steps: int = RefinedSettings.steps
    entries_per_task: int = RefinedSettings.entries_per_task
    entry_policy: Literal["random", "k-center"] = RefinedSettings.entry_policy
    learning_rate: float | None = None  # None: searched for each task, on its validation split
    calibrate: Literal["first", "every", "never"] = RefinedSettings.calibrate
    anchors_per_task: int = 64
    base: bool = True  # whether the gate is shown base questions

    def learn(self, task: TaskData, previous: Path | None, out: Path, circumstances: Circumstances) -> Artifact:
        backbone = Backbone.load(circumstances.model)
        if previous is not None:
            shutil.copytree(previous / ANCHORS, out / ANCHORS)
        store = AnchorStore(out / ANCHORS)
        before = None if previous is None else read_bundle(previous / BUNDLE)
        inputs = TaskInputs(task.train, task.validation, store.read(), before)
        # Nothing to go on from: the folder is new, and what an attempt that was killed has left is gone.
        checkpoint, _ = Checkpoint.open(out / "progress", {})
        base = circumstances.base if self.base else ()
        done = update_refined(backbone, inputs, self._settings(circumstances), checkpoint, base=base)
        checkpoint.remove()
        seed = circumstances.seed
        rows = choose_anchors(task.train, self.anchors_per_task, "random", seed, keys=done.training_keys)
        store.append([task.train[row] for row in rows], run=task.name, policy="random", seed=seed)
        write_bundle(done.bundle, out / BUNDLE)
        report = {name: value for name, value in done.report.items() if name != "diversity"}
        refinement = report.pop("refinement")
        report |= {"search": refinement["search"], "history": refinement["history"], "anchor_bytes": store.bytes()}
        return Artifact("bundle", BUNDLE, memory_bytes(done.bundle), report)

    def _settings(self, circumstances: Circumstances) -> RefinedSettings:
        return RefinedSettings(
            budget=circumstances.budget,
            seed=circumstances.seed,
            steps=self.steps,
            entries_per_task=self.entries_per_task,
            entry_policy=self.entry_policy,
            learning_rate=self.learning_rate,
            calibrate=self.calibrate,
        )
