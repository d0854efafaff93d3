"""The error for each kind of model folder that cannot have a memory."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BloomConfig,
    CohereConfig,
    DeepseekV2Config,
    Gemma2Config,
    GptOssConfig,
    KimiLinearConfig,
    LagunaConfig,
    MiMoV2FlashConfig,
    MistralConfig,
    Qwen3Config,
    T5Config,
)

from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.backbone.quantization import rounds_activations
from inducekv_vllm.errors import UnsupportedModel
from selector.backbone.loading import require_trainable_attention
from selector.backbone.model import Backbone
from tests.quantized import METHODS
from tests.tiny_families import FAMILIES
from tests.tiny_models import save_tiny_llava, save_tiny_text_model

QUERIES = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"](tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, name: str, tensor: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: tensor}, path, metadata={"format": "pt"})


def quantized_text(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    change_config(folder, text_config=text | {"quantization_config": {"quant_method": "awq", "bits": 4}})


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def settings_alone(folder: Path) -> None:
    """transformers makes a LlamaTokenizer of four tokens of them."""
    without_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')


SETTINGS = [
    ("architectures", None, "names no architecture"),
    ("architectures", ["LlamaForSequenceClassification"], "expected a model that generates text"),
    ("hidden_size", "96", "must state hidden_size as a positive whole number, found '96'"),
    ("rms_norm_eps", "small", "'rms_norm_eps': TypeError: Field 'rms_norm_eps' expected float, got str"),
    ("quantization_config", "awq", "quantization_config must be a JSON object, found 'awq'"),
    ("quantization_config", {"quant_method": "bitsandbytes"}, r"quantised \(bitsandbytes\): expected plain weights"),
]
# Nothing else says here that the weights are quantised, and most of their names are those of plain ones.
WEIGHTS = [
    (f"{QUERIES}.weight_scale", torch.ones(1), f"they have {QUERIES}.weight_scale"),
    (f"{QUERIES}.SCB", torch.ones(4), f"they have {QUERIES}.SCB"),
    (f"{QUERIES}.weight.absmax", torch.ones(4), f"they have {QUERIES}.weight.absmax"),
    (f"{QUERIES}.weight", torch.ones(256, 96, dtype=torch.int8), f"{QUERIES}.weight in .* the dtype I8"),
    (f"{QUERIES}.weight", torch.ones(256, 96).to(torch.float8_e4m3fn), f"{QUERIES}.weight .* the dtype F8_E4M3"),
    ("mlp.experts.gate_up_proj", torch.ones(2, 4, 4, dtype=torch.uint8), ".*gate_up_proj .* the dtype U8"),
]
OTHERS: list[tuple[Callable[[Path], Any], str]] = [
    (settings_alone, "the model has no tokenizer: expected tokenizer.json"),
    (lambda folder: T5Config().save_pretrained(folder), "t5 is an encoder-decoder"),
    (lambda folder: (folder / "hf_quant_config.json").write_text("{}"), r"quantised \(modelopt\)"),
    (lambda folder: (folder / "quantize_config.json").write_text("{}"), r"quantised \(gptq\)"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"damaged"), r"cannot read the weights in .*header"),
    (lambda folder: (folder / "config.json").unlink(), "expected a model folder, found no config.json in it"),
]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        *((partial(change_config, **{name: value}), reason) for name, value, reason in SETTINGS),
        *((partial(change_weights, name=name, tensor=t), rf"quantised \({reason}\)") for name, t, reason in WEIGHTS),
        *OTHERS,
    ],
)
def test_folders_that_the_loader_and_a_server_refuse_alike(
    copy: Path, spoil: Callable[[Path], Any], reason: str
) -> None:
    spoil(copy)
    with pytest.raises(UnsupportedModel) as loading:
        Backbone.load(copy)
    with pytest.raises(UnsupportedModel) as fingerprint:
        backbone_fingerprint(copy)
    assert str(loading.value) == str(fingerprint.value)
    assert re.search(f"^{copy}: .*{reason}[^\n]*$", str(loading.value))


def in_pickle(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors") | {f"{QUERIES}.weight_scale": torch.ones(1)}
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot load the tokenizer"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "no chat template"),
        (in_pickle, r"quantised \(they have .*weight_scale"),
        (partial(change_config, intermediate_size=-1), "cannot load the model: .*negative dimension"),
        (partial(change_config, hidden_act="bogus"), "cannot load the model: .*bogus"),
        (partial(change_config, num_hidden_layers=4), r"9 weights of LlamaForCausalLM are missing.* model.layers.3"),
        (partial(change_config, num_hidden_layers=2), r"there is no layer 2, found model\.layers\.2\.self_attn"),
        (partial(change_config, intermediate_size=8), r"down_proj\.weight has the shape \[96, 8\], found \[96, 192\]"),
    ],
)
def test_folders_that_are_not_loaded(copy: Path, spoil: Callable[[Path], Any], reason: str) -> None:
    spoil(copy)
    with pytest.raises(UnsupportedModel, match=f"copy: .*{reason}"):
        Backbone.load(copy)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (quantized_text, r"its weights are quantised \(awq\)"),
        (without_tokenizer, "the model has no tokenizer"),
        (lambda folder: (folder / "processor_config.json").unlink(), "processor of"),
    ],
)
def test_multimodal_folders_that_are_not_loaded(spoil: Callable[[Path], Any], reason: str, tmp_path: Path) -> None:
    spoil(save_tiny_llava(tmp_path))
    with pytest.raises(UnsupportedModel, match=reason):
        Backbone.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("embeddings.position_ids", torch.arange(4)[None]),  # a buffer of whole numbers
        ("attn.bias", torch.ones(1, 1, 4, 4).byte()),
        ("speech.layers.0.self_attn.k_proj.weight", torch.ones(2, 2)),  # of a component that transformers leaves out
        ("model.layers.2.mlp.correction", torch.ones(2)),
    ],
)
def test_weights_that_are_no_error(copy: Path, name: str, tensor: torch.Tensor) -> None:
    change_weights(copy, name, tensor)
    assert Backbone.load(copy).fingerprint == backbone_fingerprint(copy)


def test_a_layer_that_makes_drafts(tmp_path: Path) -> None:
    """It comes behind the model's own, and is none of it; one more than the configuration names is."""
    FAMILIES["glm4-moe"](tmp_path)
    change_config(tmp_path, num_nextn_predict_layers=1)
    change_weights(tmp_path, "model.layers.3.self_attn.k_proj.weight", torch.ones(2, 2))
    assert Backbone.load(tmp_path).num_layers == 3
    change_weights(tmp_path, "model.layers.4.self_attn.k_proj.weight", torch.ones(2, 2))
    with pytest.raises(UnsupportedModel, match=r"there is no layer 4, found model\.layers\.4\.self_attn"):
        Backbone.load(tmp_path)


def test_whether_activations_are_rounded() -> None:
    rounded = {name for name, (_, settings) in METHODS.items() if rounds_activations(settings)}
    assert rounded == {"int-quantized", "fp8", "fp8-blocks", "modelopt-fp8", "modelopt-nvfp4"}


TEXT = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
TEXT |= {"num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
FULL = {"layer_types": ["full_attention"] * 2, "sliding_window": None}
INDEXED = {"layer_types": ["indexed_attention", "full_attention"]}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
FOUR_HEADS = {**FULL, "sliding_window": 16, "num_attention_heads_per_layer": [2, 4], "mlp_layer_types": ["dense"] * 2}
NARROW_VALUES = {**FULL, "sliding_window": 16, "v_head_dim": 16, "mlp_layer_types": ["dense"] * 2}
LATENT |= {"first_k_dense_replace": 2, "n_routed_experts": 2, "num_experts_per_tok": 1}

KIMI = LATENT | {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense"] * 2}
KIMI |= {"linear_head_dim": 32, "linear_num_heads": 2}


@pytest.mark.parametrize(
    ("config", "settings", "reason"),
    [
        (MistralConfig, {"sliding_window": 16}, "every layer has a sliding window, of 16 tokens"),
        (Qwen3Config, INDEXED, "not trained in layers with indexed_attention"),
        (BloomConfig, {}, "transformers has the attention of bloom in a form of its own"),
        (LagunaConfig, FOUR_HEADS, "same heads, found 2 heads and 2 KV heads of 32 in layer 0, 4 heads and 2"),
        (KimiLinearConfig, KIMI, r"latent attention \(MLA\) in every layer: .* delta attention \(KDA\)"),
        (MiMoV2FlashConfig, NARROW_VALUES, "by the configuration of 64 numbers a token, found 64 and 32 in layer 0"),
    ],
)
def test_attention_that_memory_is_not_trained_with(
    config: type[Any], settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = save_tiny_text_model(tmp_path, lambda **numbers: config(**TEXT, **(numbers | settings)))
    with pytest.raises(UnsupportedModel, match=reason):
        Backbone.load(folder)


@pytest.mark.parametrize(
    ("config", "settings", "found"),
    [
        (Gemma2Config, {}, "a sliding window in 1 of 2"),
        (Gemma2Config, FULL, "a soft cap on its logits"),
        (GptOssConfig, FULL | EXPERTS, "sinks"),
        (DeepseekV2Config, LATENT, r"multi-head latent attention \(MLA\)"),
    ],
)
def test_attention_that_merged_memory_is_not_trained_with(
    config: type[Any], settings: dict[str, Any], found: str, tmp_path: Path
) -> None:
    folder = save_tiny_text_model(tmp_path, lambda **numbers: config(**TEXT, **(numbers | settings)))
    backbone = Backbone.load(folder)
    with pytest.raises(UnsupportedModel, match=f"needs full attention in every layer, found {found}: make decoupled"):
        backbone.require_full_attention()


def test_norms_that_name_their_epsilon_otherwise(tmp_path: Path) -> None:
    folder = save_tiny_text_model(tmp_path, lambda **numbers: CohereConfig(**TEXT, layer_norm_eps=3e-5, **numbers))
    assert Backbone.load(folder).fingerprint.norm == {"eps": 3e-5}


@pytest.mark.parametrize("missing", ["k_proj", "v_proj"])
def test_attention_with_other_projections(missing: str, llama: Path) -> None:
    """Gemma 4's global layers take their keys as values: their `v_proj` is None."""
    network = Backbone.load(llama).model
    setattr(network.model.layers[1].self_attn, missing, None)
    with pytest.raises(UnsupportedModel, match="some: memory needs attention with k_proj and v_proj"):
        require_trainable_attention(network, "some")
