"""A bundle without entries, whose gate sends each request to its task's LoRA adapter or to the untouched model.

Shapes: L layers, J KV heads, D head size, d hidden size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch

from inducekv_vllm.bundle import AdapterRecord, Bundle, bundle_without_entries
from inducekv_vllm.bundle.adapters import WEIGHTS, read_adapter
from inducekv_vllm.errors import BundleError

from ..backbone.model import Backbone
from ..gate.data import GateData
from ..gate.fit import FittedGate, fit_gate
from .settings import ROUTE


def route_bundle(
    backbone: Backbone, data: GateData, adapters: Mapping[str, Path], *, relative_to: Path, progress: bool = False
) -> tuple[Bundle, FittedGate]:
    """Fit a gate to questions of tasks and questions that need no adapter.

    Args:
        adapters: their folders, by task.
        relative_to: the folder of the bundle; adapters below it are recorded relative to it.

    Raises:
        BundleError: an adapter cannot be read, is of another base, or belongs to two tasks.
        ConfigError: see `selector.gate.data.check_questions`.
    """
    records = tuple(_record(backbone, task, folder, relative_to) for task, folder in adapters.items())
    fitted = fit_gate(backbone, data, progress=progress)
    questions = {task: len(examples) for task, examples in data.own.items()}
    bundle = bundle_without_entries(
        backbone.fingerprint,
        recipe=ROUTE,
        settings={**fitted.recorded, "questions": questions},
        gate=fitted.gate,
        task_adapters=records,
    )
    return bundle, fitted


def _record(backbone: Backbone, task: str, folder: Path, relative_to: Path) -> AdapterRecord:
    files = read_adapter(folder)
    _require_base(backbone, task, folder)
    absolute, root = folder.resolve(), relative_to.resolve()
    path = os.path.relpath(absolute, root) if absolute.is_relative_to(root) else str(absolute)
    return AdapterRecord(task=task, path=path, digest=files.digest, rank=files.rank)


def _require_base(backbone: Backbone, task: str, folder: Path) -> None:
    """Check that every matrix of the adapter belongs to a linear layer of the model and fits it."""
    name = f"the adapter of task {task!r} in {folder}"
    try:
        with safetensors.safe_open(str(folder / WEIGHTS), framework="pt") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise BundleError(f"{name}: cannot read the weights: {error}") from error
    linear = [(path, m) for path, m in backbone.model.named_modules() if isinstance(m, torch.nn.Linear)]
    for key, shape in shapes.items():
        module_name, _, matrix = key.partition(".lora_")
        # What stands before the layers depends on the version of transformers that the adapter was trained with.
        tail = module_name[module_name.find(".layers.") :]
        sizes = [
            (1, m.in_features) if matrix.startswith("A") else (0, m.out_features)
            for path, m in linear
            if f".{path}".endswith(tail)
        ]
        if not any(len(shape) == 2 and shape[side] == size for side, size in sizes):
            raise BundleError(f"{name} is of another base: the model has no linear layer for {key} of shape {shape}")
