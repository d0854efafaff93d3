"""LoRA on every linear layer of the language model, trained on one task after the other, with replay or without.

One adapter for the whole stream, trained on from where the task before left it (peft). Its rank is the largest whose
float16 bytes are no more than those of a memory of the same budget. With replay, half of every batch are anchors of
the tasks before, drawn and stored as the selector draws and stores its own.

The learning rate, and it alone, is searched. With one rate given, it is used as it is: the default was chosen for the
whole stream, by final accuracy on validation questions (`--split validation`). With several, short trials on each
task's own validation split decide; they favour high rates, which learn a task fast and cost the others more.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from benchmarks.continual.suites import TaskData
from selector.anchors import AnchorStore, choose_anchors
from selector.backbone import Backbone
from selector.data import Example
from selector.objective import Scorer

from .adapter import attach, largest_rank, memory_bytes, reattach, save
from .fit import Fit
from .method import Artifact, Circumstances

ADAPTER, ANCHORS = "adapter", "anchors"


@dataclass(frozen=True)
class Lora:
    """LoRA over the stream."""

    kind: ClassVar[str] = "adapter"

    name: str
    replay: bool
    steps: int = 300
    trial_steps: int = 50
    learning_rates: tuple[float, ...] = (5e-4,)
    batch_size: int = 16
    anchors_per_task: int = 64
    autocast: bool = True  # bfloat16 while training
    judge_anchors: bool = False
    payload_tokens: int = 8  # m of the memory whose bytes the adapter may take

    def learn(self, task: TaskData, previous: Path | None, out: Path, circumstances: Circumstances) -> Artifact:
        began = time.monotonic()
        backbone = Backbone.load(circumstances.model)
        allowed = memory_bytes(backbone, circumstances.budget, self.payload_tokens, circumstances.num_tasks)
        rank = largest_rank(backbone, allowed)
        adapted = reattach(backbone, previous / ADAPTER) if previous else attach(backbone, rank, circumstances.seed)
        anchors = self._earlier_anchors(previous, out)
        fit = Fit(
            scorer=Scorer(backbone),
            parameters=[parameter for parameter in adapted.parameters() if parameter.requires_grad],
            training=task.train,
            validation=task.validation,
            anchors=anchors,
            batch_size=self.batch_size,
            seed=(circumstances.seed, circumstances.number),
            autocast=self.autocast,
            judge_anchors=self.judge_anchors,
        )
        rate, trials = fit.search(self.learning_rates, self.trial_steps)
        searched = time.monotonic()
        history = fit.run(rate, self.steps)
        report = {
            "rank": rank,
            "bytes_allowed": allowed,
            "learning_rate": rate,
            "search": trials,
            "history": history,
            "validation_nll": fit.mean_loss(task.validation),
            "anchors_replayed": len(anchors),
            "anchor_bytes": self._keep_anchors(task, out, circumstances),
            "seconds": {"search": round(searched - began, 1), "training": round(time.monotonic() - searched, 1)},
        }
        return Artifact("adapter", ADAPTER, save(adapted, out / ADAPTER), report)

    def _earlier_anchors(self, previous: Path | None, out: Path) -> list[Example]:
        """Those of all tasks before, copied into the new state."""
        if not self.replay or previous is None:
            return []
        shutil.copytree(previous / ANCHORS, out / ANCHORS)
        return AnchorStore(out / ANCHORS).read()

    def _keep_anchors(self, task: TaskData, out: Path, circumstances: Circumstances) -> int:
        """Adds the task's own anchors; returns the bytes of all."""
        if not self.replay:
            return 0
        seed = circumstances.seed
        unread = torch.empty(0)  # "random" looks at no keys
        rows = choose_anchors(task.train, self.anchors_per_task, "random", seed, keys=unread)
        store = AnchorStore(out / ANCHORS)
        store.append([task.train[row] for row in rows], run=task.name, policy="random", seed=seed)
        return store.bytes()
