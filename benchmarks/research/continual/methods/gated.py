"""The rivals that are most like the memory: adapters behind its relevance gate.

If the gate decides that a question belongs to no task of the stream, the untouched model answers it. The gate is fitted
like the memory's own, to the same questions as the refined recipe's: anchors of every task, the new task's training and
validation questions, and base questions. Adapters and gate take no more bytes than the memory with its gate.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import safetensors
import safetensors.torch

from benchmarks.lora_adapter import memory_bytes
from benchmarks.research.continual.methods.lora import ADAPTER, LoraReplay
from benchmarks.research.continual.methods.method import Artifact, Kind, RunContext
from benchmarks.research.continual.methods.rehearsal import ANCHORS, earlier_anchors
from benchmarks.research.continual.suites import TaskData
from inducekv_vllm.bundle import Gate
from inducekv_vllm.bundle.tensors import DTYPES
from inducekv_vllm.gate import TurnMarks
from selector.backbone.model import Backbone
from selector.data.anchors import AnchorStore
from selector.data.examples import Example
from selector.gate.data import GateData
from selector.gate.fit import fit_gate
from selector.gate.settings import GateOptions
from selector.runtime.files import replace_file

ADAPTERS = "adapters"
GATE = "gate.safetensors"
RATES = (1e-3, 3e-3, 1e-2)  # of a LoRA for each task


@dataclass(frozen=True)
class GatedLoraReplay(LoraReplay):
    """LoRA + replay: one adapter for all tasks, used if the gate is open."""

    kind: ClassVar[Kind] = "gated_adapter"
    name: str = "gated_lora_replay"
    base: bool = True  # whether the gate is fitted to base questions too

    def bytes_allowed(self, backbone: Backbone, context: RunContext) -> int:
        return memory_bytes(backbone, context.budget, self.payload_tokens, gated_tasks=0)

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        learnt = super().learn(task, previous, out, context)
        return gated(learnt, "gated_adapter", task, out, context, self.base)


@dataclass(frozen=True)
class GatedTaskLora(LoraReplay):
    """A LoRA of its own for each task, never changed afterwards, and chosen by the gate: it cannot forget.

    Like the memory's quota for each task, a task's share of the bytes is the memory's, divided by the number of tasks
    of the whole stream. Anchors are kept for the gate alone. For the demo model and eight tasks that is rank 1 at
    budget 32 and rank 3 at budget 64. A budget that does not even allow rank 1 is refused.
    """

    kind: ClassVar[Kind] = "gated_adapters"
    name: str = "gated_task_lora"
    base: bool = True
    learning_rate: float | None = 3e-3  # larger, for so small a rank; None: chosen for each task, by validation loss

    def bytes_allowed(self, backbone: Backbone, context: RunContext) -> int:
        together = memory_bytes(backbone, context.budget, self.payload_tokens, gated_tasks=0)
        return together // context.num_tasks

    def rates(self) -> Sequence[float]:
        return RATES if self.learning_rate is None else (self.learning_rate,)

    def learn(self, task: TaskData, previous: Path | None, out: Path, context: RunContext) -> Artifact:
        earlier_anchors(previous, out)
        learnt = super().learn(task, None, out, context)
        if previous is not None:
            shutil.copytree(previous / ADAPTERS, out / ADAPTERS)
        (out / ADAPTERS).mkdir(exist_ok=True)
        (out / ADAPTER).rename(out / ADAPTERS / task.name)
        together = replace(learnt, path=ADAPTERS, stored_bytes=learnt.stored_bytes * (context.number + 1))
        return gated(together, "gated_adapters", task, out, context, self.base)


def gated(learnt: Artifact, kind: Kind, task: TaskData, out: Path, context: RunContext, base: bool) -> Artifact:
    """The artifact of a state that holds anchors of all tasks, behind a gate that is fitted and written here."""
    anchors = [anchor for anchor in AnchorStore(out / ANCHORS).read() if anchor.task != task.name]
    gate = gate_of(Backbone.load(context.model), task, anchors, context.base if base else (), context.seed)
    size = write_gate(gate, out / GATE)
    report = learnt.report | {"gate_bytes": size, "gate_thresholds": gate.thresholds.tolist()}
    return Artifact(kind, learnt.path, learnt.stored_bytes + size, report)


def gate_of(backbone: Backbone, task: TaskData, anchors: Sequence[Example], base: Sequence[Example], seed: int) -> Gate:
    """The gate after `task`; `anchors` are of the tasks before, in the order of the stream."""
    names = dict.fromkeys(anchor.task for anchor in anchors)
    own = {name: [anchor for anchor in anchors if anchor.task == name] for name in names}
    data = GateData(own | {task.name: [*task.train, *task.validation]}, base)
    return fit_gate(backbone, data, GateOptions(seed=seed)).gate


def write_gate(gate: Gate, path: Path) -> int:
    """Writes the gate's tensors as a bundle stores them, and its record; returns the tensors' bytes."""
    tensors = {name: tensor.to(DTYPES[name]).contiguous() for name, tensor in gate.tensors().items()}
    record = json.dumps(gate.record.model_dump() | {"tasks": gate.tasks})  # one text: several have no order in a file
    replace_file(path, safetensors.torch.save(tensors, metadata={"gate": record}))
    return sum(tensor.nbytes for tensor in tensors.values())


def read_gate(path: Path) -> Gate:
    """Reads a file of `write_gate`."""
    with safetensors.safe_open(str(path), framework="pt") as file:
        record = json.loads(file.metadata()["gate"])
        marks = TurnMarks(tuple(record["turn_begin"]), record["turn_end"])
        tensors = {name.removeprefix("gate_"): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    near = None if (near := record.get("near")) is None else tuple(near)
    return Gate(layers=tuple(record["layers"]), marks=marks, tasks=tuple(record["tasks"]), near=near, **tensors)
