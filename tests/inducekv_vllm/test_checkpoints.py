"""Which kind of model a folder holds, and the error for each kind that cannot have a memory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    DeepseekV2Config,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    Phi3Config,
    T5Config,
)

from inducekv_vllm.checkpoints import kind_of, load_tokenizer
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.fingerprint import backbone_fingerprint
from selector.backbone.model import Backbone
from selector.cli.bundle import main
from tests.tiny_families import FAMILIES, PICTURE_FAMILIES
from tests.tiny_models import save_tiny_llava, save_tiny_text_model

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"](tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def change_config(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def refusals(folder: Path) -> str:
    """What the loader, the fingerprint of a server and the bundle commands all say: the same, in one line."""
    with pytest.raises(UnsupportedModel) as loading:
        Backbone.load(folder)
    with pytest.raises(UnsupportedModel) as fingerprint:
        backbone_fingerprint(folder)
    assert str(loading.value) == str(fingerprint.value)
    assert "\n" not in str(loading.value)
    return str(loading.value)


@pytest.mark.parametrize("family", ["llama", "qwen2.5-vl", "internvl"])
def test_kinds(family: str, tmp_path: Path) -> None:
    folder = FAMILIES[family](tmp_path)
    kind = kind_of(AutoConfig.from_pretrained(folder), folder)
    assert kind == ("multimodal" if family in PICTURE_FAMILIES else "text")


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "compressed-tensors"])
def test_quantised_weights_are_refused_by_name(copy: Path, method: str) -> None:
    change_config(copy, quantization_config={"quant_method": method, "bits": 4})
    assert f"its weights are quantised ({method})" in refusals(copy)


def test_quantised_text_weights_of_a_multimodal_model_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_llava(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    assert "its weights are quantised (awq)" in refusals(folder)


def test_an_encoder_decoder_is_refused(copy: Path) -> None:
    T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2).save_pretrained(copy)
    assert "t5 is an encoder-decoder" in refusals(copy)


def test_a_reward_model_is_refused(copy: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(**SIZES, vocab_size=400, num_labels=1)).save_pretrained(copy)
    expected = "expected a model that generates text (LlamaForCausalLM), found LlamaForSequenceClassification"
    assert expected in refusals(copy)


def test_a_folder_without_a_tokenizer_is_refused(copy: Path, tmp_path: Path) -> None:
    for file in copy.glob("tokenizer*"):
        file.unlink()
    assert "the model has no tokenizer" in refusals(copy)
    pictures = save_tiny_llava(tmp_path / "llava")
    for file in pictures.glob("tokenizer*"):
        file.unlink()
    assert "the model has no tokenizer" in refusals(pictures)


def test_a_damaged_tokenizer_is_named(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="cannot load the tokenizer"):
        load_tokenizer(copy)


def test_other_parts_that_are_missing(copy: Path, tmp_path: Path) -> None:
    change_config(copy, architectures=None)
    assert "names no architecture" in refusals(copy)
    change_config(copy, architectures=["LlamaForCausalLM"], num_hidden_layers=4)
    with pytest.raises(UnsupportedModel, match=r"9 weights of LlamaForCausalLM are missing.* model.layers.3"):
        Backbone.load(copy)
    change_config(copy, num_hidden_layers=3)
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(UnsupportedModel, match="no chat template"):
        Backbone.load(copy)
    pictures = save_tiny_llava(tmp_path / "llava")
    (pictures / "processor_config.json").unlink()
    with pytest.raises(UnsupportedModel, match="processor of"):
        Backbone.load(pictures)


TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
TEXT |= {"num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": None}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
LATENT |= {"first_k_dense_replace": 2, "n_routed_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        (Gemma2Config, {}, "full attention in every layer, found full_attention, sliding_attention"),
        (Gemma2Config, FULL, "a soft cap on its logits"),
        (GptOssConfig, FULL | EXPERTS, "attention that has sinks"),
        (DeepseekV2Config, LATENT, "multi-head latent attention"),
        (Phi3Config, {"pad_token_id": 0}, "k_proj and v_proj"),
    ],
)
def test_attention_that_memory_is_not_trained_with(
    config: type[Any], settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = save_tiny_text_model(tmp_path, lambda **numbers: config(**TEXT, **(numbers | settings)))
    with pytest.raises(UnsupportedModel, match=reason):
        Backbone.load(folder)


def test_bundle_commands_refuse_them(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_config(copy, quantization_config={"quant_method": "awq", "bits": 4})
    task = tmp_path / "task.jsonl"
    task.write_text('{"id": "1", "task": "t", "messages": [{"role": "user", "content": "?"}], "answer": "a"}\n')
    arguments = [
        "--model",
        str(copy),
        "--task",
        str(task),
        "--budget",
        "1",
        "--output",
        str(tmp_path / "b.safetensors"),
    ]
    assert main(["build", *arguments]) == 2
    assert "quantised (awq)" in capsys.readouterr().err
    assert not (tmp_path / "b.safetensors").exists()
