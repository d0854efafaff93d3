"""Fingerprints do not depend on how a model is stored, and differ for every relevant change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
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
    assert fingerprint.norm == {"eps": 1e-6, "k_norm": True}

    qwen = backbone_fingerprint(save_tiny_qwen3_vl(tmp_path / "qwen"))
    assert qwen.architecture == "Qwen3VLForConditionalGeneration/qwen3_vl_text"
    assert qwen.rope["mrope_section"] == [12, 10, 10]

    llama = backbone_fingerprint(save_tiny_llava(tmp_path / "llama", k_norm=False))
    assert llama.norm["k_norm"] is False
    assert len(fingerprint.differences(llama)) == 2  # architecture and norm


def test_weights_do_not_enter(copy: Path, llava: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert backbone_fingerprint(copy) == backbone_fingerprint(llava)
    assert backbone_fingerprint(str(copy)) == backbone_fingerprint(llava)


def test_no_random_number_is_drawn(llava: Path) -> None:
    before = torch.get_rng_state()
    backbone_fingerprint(llava)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_tokenizers_file_format_does_not_matter(copy: Path, llava: Path) -> None:
    path = copy / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))
    path.write_text(json.dumps(content, indent=7))
    assert backbone_fingerprint(copy) == backbone_fingerprint(llava)


def test_a_changed_vocabulary_is_another_backbone(copy: Path, llava: Path) -> None:
    path = copy / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    (line,) = backbone_fingerprint(copy).differences(backbone_fingerprint(llava))
    assert line.startswith("tokenizer_digest")


def test_a_changed_chat_template_is_another_backbone(copy: Path, llava: Path) -> None:
    path = copy / "chat_template.jinja"
    path.write_text(path.read_text() + " ")
    (line,) = backbone_fingerprint(copy).differences(backbone_fingerprint(llava))
    assert line.startswith("tokenizer_digest")


@pytest.mark.parametrize(
    ("key", "value", "field"), [("rms_norm_eps", 1e-5, "norm"), ("num_hidden_layers", 4, "num_layers")]
)
def test_a_changed_setting_is_another_backbone(copy: Path, llava: Path, key: str, value: float, field: str) -> None:
    path = copy / "config.json"
    config = json.loads(path.read_text())
    config["text_config"][key] = value
    config["text_config"].pop("layer_types", None)
    path.write_text(json.dumps(config))
    (line,) = backbone_fingerprint(copy).differences(backbone_fingerprint(llava))
    assert line.startswith(field)


def test_folders_that_hold_no_model(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no such model folder"):
        backbone_fingerprint(tmp_path / "nothing")
    with pytest.raises(UnsupportedModel, match=r"no config\.json"):
        backbone_fingerprint(tmp_path)
    (copy / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match="cannot load"):
        backbone_fingerprint(copy)
