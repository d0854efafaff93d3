"""`inducekv-bundle route` takes an adapter only if all of it acts in the language model: vLLM leaves out the rest."""

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
from tests.tiny_families import FAMILIES

LANGUAGE = "model.language_model.layers."  # as transformers has them in LLaVA
TOWER = "model.vision_tower.encoder.layers."
USUAL: dict[str, Any] = {"wider": 1, "ends": ("q_proj", "v_proj")}  # how many times as many inputs A has


def adapter(backbone: Backbone, folder: Path, name: Callable[[str], str], of: str = LANGUAGE, **changed: Any) -> Path:
    """A random adapter of some projections beneath `of`, with other names.

    Args:
        changed: from `USUAL`, and what else the configuration says.
    """
    wider, ends = (changed.pop(name, usual) for name, usual in USUAL.items())
    tensors = {}
    for path, module in backbone.model.named_modules():
        if path.startswith(of) and path.endswith(ends):
            tensors[f"{name(path)}.lora_A.weight"] = torch.randn(4, wider * module.in_features)
            tensors[f"{name(path)}.lora_B.weight"] = torch.randn(module.out_features, 4)
    assert tensors
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8} | changed))
    return folder


@pytest.mark.parametrize("layers", [LANGUAGE, "language_model.model.layers."], ids=["transformers", "checkpoint"])
def test_an_adapter_of_the_language_model_is_taken(layers: str, llava: Backbone, tmp_path: Path) -> None:
    found = adapter(llava, tmp_path / "a", lambda path: f"base_model.model.{path.replace(LANGUAGE, layers)}")
    require_base(llava, read_adapter(found), "the adapter")


def test_projections_in_one_are_adapted_together(tmp_path: Path) -> None:
    """Phi-3's `qkv_proj`, which is taken apart here, and served whole."""
    phi = Backbone.load(FAMILIES["phi3"](tmp_path / "phi3"))
    found = adapter(phi, tmp_path / "a", lambda path: f"base_model.model.{path}", "model.layers.", ends=("qkv_proj",))
    require_base(phi, read_adapter(found), "the adapter")


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


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"peft_type": "IA3"}, "expected the peft_type 'LORA', found 'IA3'"),
        ({"r": 0}, r"expected positive ranks, found \[0\]"),
        ({"rank_pattern": {"v_proj": "2"}}, r"expected positive ranks, found \[4, '2'\]"),
        ({"rank_pattern": ["v_proj"]}, r"rank_pattern must be an object, found \['v_proj'\]"),
    ],
)
def test_what_is_no_configuration_of_lora_is_named(
    changed: dict[str, Any], problem: str, llava: Backbone, tmp_path: Path
) -> None:
    folder = adapter(llava, tmp_path / "a", lambda path: f"base_model.model.{path}", **changed)
    with pytest.raises(BundleError, match=f"adapter_config.json: {problem}"):
        read_adapter(folder)
