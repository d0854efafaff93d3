"""`inducekv-bundle route` takes an adapter only if all of it acts in the language model: vLLM leaves out the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from inducekv_vllm.bundle.adapters import read_adapter
from inducekv_vllm.errors import BundleError
from selector.backbone.model import Backbone
from selector.update.route import require_base

LANGUAGE = "model.language_model.layers."  # as transformers has them in LLaVA
TOWER = "model.vision_tower.encoder.layers."


def adapter(backbone: Backbone, folder: Path, name: Callable[[str], str], of: str = LANGUAGE, **changed: Any) -> Path:
    """A random adapter of the query and value projections beneath `of`, with other names.

    Args:
        changed: `scale` of the matrices B, `wider` inputs, and what else the configuration says.
    """
    scale, wider = changed.pop("scale", 1.0), changed.pop("wider", 1)
    tensors = {}
    for path, module in backbone.model.named_modules():
        if path.startswith(of) and path.endswith(("q_proj", "v_proj")):
            tensors[f"{name(path)}.lora_A.weight"] = torch.randn(4, wider * module.in_features)
            tensors[f"{name(path)}.lora_B.weight"] = scale * torch.randn(module.out_features, 4)
    assert tensors
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | changed))
    return folder


@pytest.mark.parametrize("layers", [LANGUAGE, "language_model.model.layers."], ids=["transformers", "checkpoint"])
def test_an_adapter_of_the_language_model_is_taken(layers: str, llava: Backbone, tmp_path: Path) -> None:
    found = adapter(llava, tmp_path / "a", lambda path: f"base_model.model.{path.replace(LANGUAGE, layers)}")
    require_base(llava, read_adapter(found), "the adapter")


@pytest.mark.parametrize(
    ("of", "called", "met", "first"),
    [
        (LANGUAGE, (LANGUAGE, "model.layers."), "0 of 12", "model.layers.0.self_attn."),
        (TOWER, ("", ""), "0 of 8", "model.vision_tower.encoder.layers.0.self_attn."),
        (LANGUAGE, (LANGUAGE, "transformer.h."), "0 of 12", "transformer.h.0.self_attn."),
        (LANGUAGE, ("layers.1.", "layers.41."), "8 of 12", "model.language_model.layers.41.self_attn."),
        (LANGUAGE, ("v_proj", "value"), "6 of 12", "model.language_model.layers.0.self_attn.value"),
    ],
    ids=["text-only twin", "vision tower", "other names", "deeper model", "other modules"],
)
def test_what_meets_no_layer_of_the_language_model_is_named(
    of: str, called: tuple[str, str], met: str, first: str, llava: Backbone, tmp_path: Path
) -> None:
    found = read_adapter(adapter(llava, tmp_path / "a", lambda path: f"base_model.model.{path.replace(*called)}", of))
    problem = f"of another base: {met} tensors fit a layer of the language model, not base_model.model.{first}"
    with pytest.raises(BundleError, match=f"^the adapter is {re.escape(problem)}"):
        require_base(llava, found, "the adapter")


def test_a_layer_of_another_size_is_refused(llava: Backbone, tmp_path: Path) -> None:
    found = read_adapter(adapter(llava, tmp_path / "a", lambda path: f"base_model.model.{path}", wider=2))
    with pytest.raises(BundleError, match=r"of another base: 6 of 12 tensors .*lora_A.weight; the first has the shape"):
        require_base(llava, found, "the adapter")


@pytest.mark.parametrize("changed", [{"scale": 0.0}, {"lora_alpha": 0}], ids=["weights", "alpha"])
def test_an_adapter_that_changes_nothing_is_refused(changed: dict[str, Any], llava: Backbone, tmp_path: Path) -> None:
    """As PEFT makes one before its first step."""
    folder = adapter(llava, tmp_path / "a", lambda path: f"base_model.model.{path}", **changed)
    with pytest.raises(BundleError, match=r"adapter_model.safetensors: the LoRA adapter changes nothing: its products"):
        read_adapter(folder)
