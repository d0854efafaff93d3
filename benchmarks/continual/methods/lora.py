"""LoRA on every linear layer of the language model, trained on one task after the other (Hu et al., 2022).

One adapter for the whole stream, trained on from where the task before left it (peft). Its rank is the largest whose
float16 bytes are no more than those of a memory of the same budget.

The methods that differ from it in what they rehearse, in a penalty, or in what they put around the adapter are in
modules of their own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from benchmarks.continual.methods.adapter import attach, largest_rank, memory_bytes, reattach, save
from benchmarks.continual.methods.fit import Fit, Penalty
from benchmarks.continual.methods.method import Artifact, Circumstances, Kind
from benchmarks.continual.suites import TaskData
from selector.backbone.model import Backbone
from selector.backbone.scoring import Scorer
from selector.data.examples import Example

ADAPTER = "adapter"


@dataclass(frozen=True)
class Lesson:
    """One task, and the adapter that is to learn it."""

    task: TaskData
    previous: Path | None  # state folder after the task before
    out: Path
    circumstances: Circumstances
    scorer: Scorer
    parameters: Sequence[nn.Parameter]  # of the adapter, as the task before left them


@dataclass(frozen=True)
class Lora:
    """LoRA over the stream, with nothing against forgetting."""

    kind: ClassVar[Kind] = "adapter"
    name: str = "lora"
    steps: int = 300
    learning_rate: float = 5e-4
    batch_size: int = 16  # examples of a step, rehearsed ones among them
    autocast: bool = True  # bfloat16 while training
    payload_tokens: int = 8  # m of the memory whose bytes the method may take
    trials: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"learning_rate": 5e-4},
        {"learning_rate": 1e-3},
        {"learning_rate": 2e-3},
    )

    def learn(self, task: TaskData, previous: Path | None, out: Path, circumstances: Circumstances) -> Artifact:
        backbone = Backbone.load(circumstances.model)
        allowed = self.bytes_allowed(backbone, circumstances)
        rank = largest_rank(backbone, allowed)
        adapted = reattach(backbone, previous / ADAPTER) if previous else attach(backbone, rank, circumstances.seed)
        parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        lesson = Lesson(task, previous, out, circumstances, Scorer(backbone), parameters)
        began = time.monotonic()
        rehearsed = self.rehearsed(lesson)
        fit = Fit(
            scorer=lesson.scorer,
            parameters=parameters,
            training=task.train,
            rehearsed=rehearsed,
            batch_size=self.batch_size,
            seed=(circumstances.seed, circumstances.number),
            autocast=self.autocast,
            penalty=self.penalty(lesson),
        )
        history = fit.run(self.learning_rate, self.steps)
        report = {
            "rank": rank,
            "bytes_allowed": allowed,
            "history": history,
            "validation_nll": fit.mean_loss(task.validation),
            "rehearsed": len(rehearsed),
            "compute": {"steps": self.steps, "batch_size": self.batch_size},
        }
        report |= self.keep(lesson)
        report["seconds"] = round(time.monotonic() - began, 1)
        return Artifact("adapter", ADAPTER, save(adapted, out / ADAPTER), report)

    def bytes_allowed(self, backbone: Backbone, circumstances: Circumstances) -> int:
        """Of one adapter: those of a memory of the whole stream, with its gate."""
        return memory_bytes(backbone, circumstances.budget, self.payload_tokens, circumstances.num_tasks)

    def rehearsed(self, lesson: Lesson) -> Sequence[Example]:
        """Examples of earlier tasks, half of every batch; what of them the next task needs goes into the new state."""
        return ()

    def penalty(self, lesson: Lesson) -> Penalty | None:
        """What is added to a step's mean NLL; made before the first step."""
        return None

    def keep(self, lesson: Lesson) -> dict[str, Any]:
        """Writes what training on later tasks needs of this one, learnt by now; returns what to report of it."""
        return {}
