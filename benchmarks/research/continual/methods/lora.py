"""LoRA on linear layers of the language model, trained on one task after the other (Hu et al., 2022).

One adapter for the whole stream, which every task trains further (peft). Its rank is the largest whose
float16 bytes are no more than those of a memory of the same budget.

With replay, examples of earlier tasks are half of every batch: LoRA + replay keeps a fixed number of anchors of each
task; ER + replay is experience replay with a reservoir (Chaudhry et al., 2019, "On Tiny Episodic Memories"), a buffer
of a fixed size that is a uniform sample of all examples so far. Its bytes are matched to the memory's, as the adapter's
are. Methods that add a penalty, or put something around the adapter, are in modules of their own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from benchmarks.fit import Fit, Penalty
from benchmarks.lora_adapter import Modules, attach, largest_rank, memory_bytes, reattach, save
from benchmarks.research.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.research.continual.methods.rehearsal import (
    content_bytes,
    earlier_anchors,
    keep_anchors,
    reservoir,
    store_buffer,
)
from benchmarks.research.continual.suites import TaskData
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.anchors import AnchorStore
from selector.data.examples import Example
from selector.refined.settings import Precision

ADAPTER = "adapter"


@dataclass(frozen=True)
class AdapterTraining:
    """One task, and the adapter that is trained on it."""

    task: TaskData
    previous: Path | None  # state folder after the previous task
    out: Path
    context: RunContext
    scorer: Scorer
    parameters: Sequence[nn.Parameter]  # of the adapter, after the previous task


@dataclass(frozen=True)
class Lora:
    """LoRA over the stream, with nothing against forgetting."""

    kind: ClassVar[Kind] = "adapter"
    name: str = "lora"
    steps: int = 300
    learning_rate: float = 5e-4
    batch_size: int = 16  # examples of a step, rehearsed ones among them
    precision: Precision = "bfloat16"  # of matrix products in training
    modules: Modules = "all"  # the layers that are adapted
    rank: int | None = None  # None: the largest that the bytes of the memory allow
    payload_tokens: int = 8  # m of the memory whose bytes the method may take

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        backbone = Backbone.load(context.model)
        allowed = self.bytes_allowed(backbone, context)
        rank = self.rank or largest_rank(backbone, allowed, self.modules)
        if previous is None:
            adapted = attach(backbone, rank, context.seed, self.modules)
        else:
            adapted = reattach(backbone, previous / ADAPTER)
        parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        scorer = Scorer(backbone)
        training = AdapterTraining(task, previous, out, context, scorer, parameters)
        began = time.monotonic()
        rehearsed, penalty = self.rehearsed(training), self.penalty(training)
        seed = (context.seed, context.number)
        fit = Fit(
            scorer, parameters, task.train, rehearsed, self.batch_size, seed, self.precision == "bfloat16", penalty
        )
        report = {
            "rank": rank,
            "bytes_allowed": allowed,
            "rehearsed": len(rehearsed),
            "compute": {"steps": self.steps * len(self.rates()), "batch_size": self.batch_size},
        }
        report |= fit.run_best(self.rates(), self.steps, task.validation)
        report["validation_accuracy"] = fit.accuracy(task.validation)
        report |= self.keep(training)
        report["seconds"] = round(time.monotonic() - began, 1)
        return Artifact("adapter", ADAPTER, save(adapted, out / ADAPTER), report)

    def rates(self) -> Sequence[float]:
        """The learning rates to train with; the one with the least validation loss is kept."""
        return (self.learning_rate,)

    def bytes_allowed(self, backbone: Backbone, context: RunContext) -> int:
        """Of one adapter: those of a memory of the whole stream, with its gate."""
        return memory_bytes(backbone, context.budget, self.payload_tokens, context.num_tasks)

    def rehearsed(self, training: AdapterTraining) -> Sequence[Example]:
        """Examples of earlier tasks, half of every batch; copies those that later tasks need into the new state."""
        return ()

    def penalty(self, training: AdapterTraining) -> Penalty | None:
        """What is added to a step's mean NLL; made before the first step."""
        return None

    def keep(self, training: AdapterTraining) -> dict[str, Any]:
        """Writes what training on later tasks needs of this one, after it was learned; returns what to report."""
        return {}


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
        store_buffer(training.out / BUFFER, buffer)
        return {"buffer": len(buffer), "buffer_bytes": sum(map(content_bytes, buffer)), "buffer_bytes_allowed": allowed}
