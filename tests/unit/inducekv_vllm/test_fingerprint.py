"""Fingerprints do not depend on how a model is stored, and differ for every relevant change."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.backbone.weights import NO_WEIGHTS
from inducekv_vllm.errors import UnsupportedModel
from tests.tiny_models import save_tiny_llava, save_tiny_qwen3_vl


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture
def copy(llava: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llava, tmp_path / "copy"))


def test_geometry_rope_and_norm_are_read(llava: Path, tmp_path: Path) -> None:
    fingerprint = backbone_fingerprint(llava)
    assert fingerprint.architecture == "LlavaForConditionalGeneration/qwen3"
    assert (fingerprint.num_layers, fingerprint.num_kv_heads) == (3, 2)
    assert (fingerprint.head_dim, fingerprint.hidden_size) == (64, 96)
    assert fingerprint.rope == {"rope_theta": 10000.0, "rope_type": "default"}
    assert fingerprint.norm == {"eps": 1e-6}

    qwen = backbone_fingerprint(save_tiny_qwen3_vl(tmp_path / "qwen"))
    assert qwen.architecture == "Qwen3VLForConditionalGeneration/qwen3_vl_text"
    assert qwen.rope["mrope_section"] == [12, 10, 10]

    llama = backbone_fingerprint(save_tiny_llava(tmp_path / "llama", k_norm=False))
    assert len(fingerprint.differences(llama)) == 2  # architecture and weights


def changed_json(path: Path, change: Callable[[Any], None], indent: int | None = None) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=indent))


def test_how_it_is_stored_does_not_matter(copy: Path, llava: Path) -> None:
    """The order within the tokenizer's file does not; and no random number is drawn."""
    before = torch.get_rng_state()

    def reverse(content: Any) -> None:
        content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))

    changed_json(copy / "tokenizer.json", reverse, indent=7)
    assert backbone_fingerprint(copy) == backbone_fingerprint(str(copy)) == backbone_fingerprint(llava)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_fine_tune_is_another_backbone(copy: Path, llava: Path) -> None:
    """Also if it has changed a single matrix."""
    assert backbone_fingerprint(str(copy)) == backbone_fingerprint(llava)
    weights = load_file(copy / "model.safetensors")
    name = next(name for name in weights if name.endswith("layers.1.self_attn.o_proj.weight"))
    weights[name] += 1e-3
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    (line,) = backbone_fingerprint(copy).differences(backbone_fingerprint(llava))
    assert line.startswith("weights_digest")


def test_how_a_checkpoint_is_divided_into_files_does_not_matter(copy: Path, llava: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(weights, reverse=True)
    shards = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: weights[name] for name in held}, copy / file)
    assert backbone_fingerprint(copy) == backbone_fingerprint(llava)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"lora": torch.ones(2)}, copy / "adapter_model.safetensors")
    assert backbone_fingerprint(copy) == backbone_fingerprint(llava)


def test_weights_that_cannot_be_told_apart_are_refused(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    assert backbone_fingerprint(copy).weights_digest == NO_WEIGHTS
    torch.save(weights, copy / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"expected weights in safetensors files, .* found pytorch_model\.bin"):
        backbone_fingerprint(copy)
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"x": "gone.safetensors"}}')
    with pytest.raises(UnsupportedModel, match=r"cannot read the weights: FileNotFoundError"):
        backbone_fingerprint(copy)


def swap(content: Any) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def setting(key: str, value: float) -> Callable[[Path], None]:
    def change(content: Any) -> None:
        content["text_config"][key] = value
        content["text_config"].pop("layer_types", None)

    return lambda folder: changed_json(folder / "config.json", change)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda folder: changed_json(folder / "tokenizer.json", swap), "tokenizer_digest"),
        (lambda folder: (folder / "chat_template.jinja").write_text("another"), "tokenizer_digest"),
        (setting("rms_norm_eps", 1e-5), "norm"),
        (setting("num_hidden_layers", 4), "num_layers"),
    ],
)
def test_what_makes_another_backbone(copy: Path, llava: Path, change: Callable[[Path], None], field: str) -> None:
    change(copy)
    (line,) = backbone_fingerprint(copy).differences(backbone_fingerprint(llava))
    assert line.startswith(field)


def test_folders_that_hold_no_model(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no such model folder"):
        backbone_fingerprint(tmp_path / "nothing")
    (copy / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="cannot load"):
        backbone_fingerprint(copy)
