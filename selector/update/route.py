"""A bundle without entries, whose gate sends each request to its task's LoRA adapter or to the untouched model.

Shapes: L layers, J KV heads, D head size, d hidden size.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from inducekv_vllm.bundle import AdapterRecord, Bundle, bundle_without_entries
from inducekv_vllm.bundle.adapters import AdapterFiles, Matrix, read_adapter
from inducekv_vllm.errors import BundleError

from ..backbone.fused import Joined
from ..backbone.loading import decoder
from ..backbone.model import Backbone
from ..gate.data import GateData
from ..gate.fit import FittedGate, fit_gate
from .settings import ROUTE

SHOWN: Final = 3  # names of tensors in an error


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
    adapter = read_adapter(folder)
    require_base(backbone, adapter, f"the adapter of task {task!r} in {folder}")
    absolute, root = folder.resolve(), relative_to.resolve()
    path = os.path.relpath(absolute, root) if absolute.is_relative_to(root) else str(absolute)
    return AdapterRecord(task=task, path=path, digest=adapter.digest, rank=adapter.rank)


def require_base(backbone: Backbone, adapter: AdapterFiles, name: str) -> None:
    """Check that every matrix of an adapter belongs to a layer of the language model that has one, and fits it.

    vLLM adapts no other ones, and knows layers by the names that the model's own checkpoints have, or transformers.

    Raises:
        BundleError: names those that do not, behind `name`.
    """
    language_model = {*decoder(backbone.model).modules(), backbone.model.get_output_embeddings()}
    sizes = {path: _sizes(module) for path, module in backbone.model.named_modules() if module in language_model}
    renames = [each for each in get_model_conversion_mapping(backbone.model) if isinstance(each, WeightRenaming)]

    def fits(matrix: Matrix | None) -> bool:
        if matrix is None:
            return False
        path, _ = rename_source_key(f"{matrix.module}.weight", renames, [])
        of_module = sizes.get(path.removesuffix(".weight"))
        side = 1 if matrix.side == "A" else 0
        return of_module is not None and len(matrix.shape) == 2 and matrix.shape[side] == of_module[side]

    if unmet := [key for key, matrix in adapter.tensors.items() if not fits(matrix)]:
        count, first = len(adapter.tensors), adapter.tensors[unmet[0]]
        shape = "" if first is None else f"; the first has the shape {list(first.shape)}"
        raise BundleError(
            f"{name} is of another base: {count - len(unmet)} of {count} tensors fit a layer of the language model, "
            f"not {', '.join(unmet[:SHOWN])}{shape}"
        )


def _sizes(module: torch.nn.Module) -> tuple[int, int] | None:
    """Outputs and inputs; None: it has no matrix."""
    if isinstance(module, torch.nn.Embedding):
        return module.embedding_dim, module.num_embeddings
    if isinstance(module, torch.nn.Linear | Joined):
        return module.out_features, module.in_features
    return None
