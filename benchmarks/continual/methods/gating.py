"""A relevance gate around adapters, fitted like the memory's own (`selector.refined.gate_fit`), in a file.

Shapes: C tasks, d hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import safetensors
import safetensors.torch

from benchmarks.continual.methods.query_keys import QueryKeyCache
from benchmarks.continual.suites import TaskData
from inducekv_vllm.bundle import Gate
from selector.data.examples import Example
from selector.refined.gate_fit import fit_gate
from selector.runtime.files import replace_file

GATE = "gate.safetensors"


def gate_of(model: Path, task: TaskData, anchors: Sequence[Example], base: Sequence[Example]) -> Gate:
    """The gate after `task`, fitted to the same questions as the refined recipe's.

    Args:
        model: the folder of the untouched one.
        anchors: of the tasks before, in the order of the stream; none of `task`.
        base: questions that no task is needed for; their answers are not used.
    """
    keys = QueryKeyCache(model).keys
    names = dict.fromkeys(anchor.task for anchor in anchors)
    own = {name: keys([anchor for anchor in anchors if anchor.task == name]) for name in names}
    return fit_gate(own | {task.name: keys([*task.train, *task.validation])}, keys(base))


def write_gate(gate: Gate, path: Path) -> int:
    """Writes keys [C, 2, d] float16 and thresholds [C] float32; returns their bytes."""
    tensors = {"keys": gate.keys.contiguous(), "thresholds": gate.thresholds.contiguous()}
    replace_file(path, safetensors.torch.save(tensors, metadata={"tasks": json.dumps(gate.tasks)}))
    return sum(tensor.nbytes for tensor in tensors.values())


def read_gate(path: Path) -> Gate:
    """Reads a file of `write_gate`."""
    with safetensors.safe_open(str(path), framework="pt") as file:
        tasks = json.loads(file.metadata()["tasks"])
        return Gate(file.get_tensor("keys"), file.get_tensor("thresholds"), tuple(tasks))
