"""Which kind of model a folder holds, and the error for each kind that cannot have a memory."""

from __future__ import annotations

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
    AutoConfig,
    DeepseekV2Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    Phi3Config,
    T5Config,
)

from inducekv_vllm.backbone.checkpoints import kind_of, load_tokenizer
from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.bundle import write_bundle
from inducekv_vllm.errors import UnsupportedModel
from selector.backbone.model import Backbone
from selector.cli.bundle import main as bundle_command
from selector.cli.select import main as select
from server.launcher import main as serve
from tests.inducekv_vllm.bundles import random_bundle
from tests.selector.conftest import record
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


def t5(folder: Path) -> None:
    T5Config(d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2).save_pretrained(folder)


def reward(folder: Path) -> None:
    LlamaForSequenceClassification(LlamaConfig(**SIZES, vocab_size=400, num_labels=1)).save_pretrained(folder)


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def quantized(folder: Path, method: str) -> None:
    change_config(folder, quantization_config={"quant_method": method, "bits": 4})


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


def test_quantised_text_weights_of_a_multimodal_model_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_llava(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    assert "its weights are quantised (awq)" in refusals(folder)


def test_a_multimodal_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    pictures = save_tiny_llava(tmp_path)
    without_tokenizer(pictures)
    assert "the model has no tokenizer" in refusals(pictures)


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "TokenizersBackend"])
def test_settings_alone_are_no_tokenizer(copy: Path, kind: str) -> None:
    """transformers makes a LlamaTokenizer of four tokens of them, and cannot make the other."""
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    assert "the model has no tokenizer: expected tokenizer.json" in refusals(copy)


def test_a_damaged_tokenizer_is_named(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match="cannot load the tokenizer"):
        load_tokenizer(copy)
    (copy / "tokenizer.json").rename(copy / "vocab.unknown")
    with pytest.raises(UnsupportedModel, match=r"cannot load the tokenizer: .* one of: \(1\) a `tokenizers` library"):
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
        (MistralConfig, {"sliding_window": 16}, "full attention in every layer, found a sliding window of 16 tokens"),
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


def text_examples(path: Path, task: str) -> Path:
    """A file of examples whose messages are plain strings."""
    rows = [
        record(row, id=f"{task}{row}", task=task, messages=[{"role": "user", "content": f"{task} {row}?"}])
        for row in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (without_tokenizer, "the model has no tokenizer: expected tokenizer.json"),
        (partial(change_config, hidden_size="96"), "must state hidden_size as a positive whole number, found '96'"),
        (t5, "t5 is an encoder-decoder"),
        (reward, "expected a model that generates text (LlamaForCausalLM), found LlamaForSequenceClassification"),
        (partial(quantized, method="awq"), "its weights are quantised (awq)"),
        (partial(quantized, method="gptq"), "its weights are quantised (gptq)"),
        (partial(quantized, method="fp8"), "its weights are quantised (fp8)"),
        (partial(quantized, method="compressed-tensors"), "its weights are quantised (compressed-tensors)"),
    ],
    ids=["no tokenizer", "malformed", "encoder-decoder", "reward model", "awq", "gptq", "fp8", "compressed-tensors"],
)
def test_every_command_refuses_them(
    spoil: Callable[[Path], Any], reason: str, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With status 2 and one line that names the folder, before anything is trained, served or written."""
    spoil(copy)
    bundle, output = tmp_path / "bundle.safetensors", tmp_path / "out.safetensors"
    write_bundle(random_bundle(), bundle)
    task, base = text_examples(tmp_path / "task.jsonl", "task"), text_examples(tmp_path / "base.jsonl", "base")
    made = [f"--model={copy}", f"--output={output}"]
    data = [f"--task={task}", "--budget=1"]
    commands: dict[str, Callable[[], int | None]] = {
        "inducekv-select": lambda: select([*made, *data, f"--anchors={tmp_path / 'anchors'}", f"--base={base}"]),
        "inducekv-bundle build": lambda: bundle_command(["build", *made, *data]),
        "inducekv-bundle route": lambda: bundle_command(
            ["route", *made, f"--base={base}", f"--adapter=t={tmp_path}:{task}"]
        ),
        "inducekv-bundle verify": lambda: bundle_command(["verify", str(bundle), f"--model={copy}"]),
        "inducekv-serve": lambda: serve([str(copy), f"--memory=m={bundle}"]),
        "inducekv-serve --model": lambda: serve(["--model", str(copy)]),
    }
    before = sorted(tmp_path.rglob("*"))
    for name, run in commands.items():
        try:
            status: Any = run()
        except SystemExit as end:
            status = end.code
        *_, line = capsys.readouterr().err.splitlines()
        assert status == 2, name
        assert line.startswith(f"{name.split()[0]}: error: {copy}: "), name
        assert reason in line, name
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("file", "method"),
    [("hf_quant_config.json", "modelopt"), ("quantize_config.json", "gptq"), ("quant_config.json", "awq")],
)
def test_quantisation_may_be_described_in_a_file_of_its_own(copy: Path, file: str, method: str) -> None:
    (copy / file).write_text("{}")
    assert f"its weights are quantised ({method})" in refusals(copy)


def change_weights(folder: Path, changes: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | changes, path, metadata={"format": "pt"})


QUERIES = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        (f"{QUERIES}.weight_scale", torch.ones(1), f"they have {QUERIES}.weight_scale"),
        (f"{QUERIES}.SCB", torch.ones(4), f"they have {QUERIES}.SCB"),
        (f"{QUERIES}.weight.absmax", torch.ones(4), f"they have {QUERIES}.weight.absmax"),
        (f"{QUERIES}.weight", torch.ones(256, 96, dtype=torch.int8), f"{QUERIES}.weight in .* the dtype I8"),
        (f"{QUERIES}.weight", torch.ones(256, 96).to(torch.float8_e4m3fn), f"{QUERIES}.weight .* the dtype F8_E4M3"),
        ("mlp.experts.gate_up_proj", torch.ones(2, 4, 4, dtype=torch.uint8), ".*gate_up_proj .* the dtype U8"),
    ],
)
def test_quantised_weights_are_found_in_the_file(copy: Path, name: str, tensor: torch.Tensor, reason: str) -> None:
    """Nothing else says here that the weights are quantised, and most of their names are those of plain ones."""
    change_weights(copy, {name: tensor})
    assert re.search(rf"copy: its weights are quantised \({reason}\)", refusals(copy))


def test_buffers_of_whole_numbers_are_no_quantised_weights(copy: Path) -> None:
    change_weights(copy, {"embeddings.position_ids": torch.arange(4)[None], "attn.bias": torch.ones(1, 1, 4, 4).byte()})
    assert backbone_fingerprint(copy) == Backbone.load(copy).fingerprint


def test_quantised_weights_without_a_header_are_found_by_their_names(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors") | {f"{QUERIES}.weight_scale": torch.ones(1)}
    (copy / "model.safetensors").unlink()
    torch.save(weights, copy / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"quantised \(they have .*weight_scale"):
        Backbone.load(copy)


def test_damaged_weights_are_named(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"damaged")
    assert re.search(r"copy: cannot read the weights in model\.safetensors: .*header", refusals(copy))


def test_weights_of_another_shape_are_named(copy: Path) -> None:
    change_config(copy, intermediate_size=8)
    reason = r"the weight model\.layers\.0\.mlp\.down_proj\.weight has the shape \[96, 8\], found \[96, 192\]"
    with pytest.raises(UnsupportedModel, match=rf"copy: by its configuration {reason}"):
        Backbone.load(copy)


def test_layers_that_the_configuration_leaves_out_are_named(copy: Path) -> None:
    change_config(copy, num_hidden_layers=2)
    reason = r"by its configuration there is no layer 2, found model\.layers\.2\.self_attn\.k_proj\.weight"
    with pytest.raises(UnsupportedModel, match=f"copy: {reason}"):
        Backbone.load(copy)


def test_components_that_transformers_leaves_out_are_no_error(copy: Path) -> None:
    speech = {f"speech.layers.{layer}.self_attn.k_proj.weight": torch.ones(2, 2) for layer in range(3)}
    change_weights(copy, speech | {"model.layers.2.mlp.correction": torch.ones(2)})
    assert Backbone.load(copy).num_layers == 3


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("hidden_size", "96", "must state hidden_size as a positive whole number, found '96'"),
        ("num_attention_heads", 0, "must state num_attention_heads as a positive whole number, found 0"),
        ("num_hidden_layers", 0, "must state num_hidden_layers as a positive whole number, found 0"),
        ("quantization_config", "awq", "quantization_config must be a JSON object, found 'awq'"),
        ("rms_norm_eps", "small", "'rms_norm_eps': TypeError: Field 'rms_norm_eps' expected float, got str"),
    ],
)
def test_malformed_settings_are_refused_in_one_line(copy: Path, setting: str, value: Any, reason: str) -> None:
    assert re.search(reason, refusals(change_config(copy, **{setting: value})))


@pytest.mark.parametrize(
    ("setting", "value", "reason"), [("intermediate_size", -1, "negative dimension"), ("hidden_act", "bogus", "bogus")]
)
def test_settings_of_which_no_model_can_be_made(copy: Path, setting: str, value: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"copy: cannot load the model: .*{reason}"):
        Backbone.load(change_config(copy, **{setting: value}))


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    assert refusals(tmp_path) == f"{tmp_path}: expected a model folder, found no config.json in it"


def test_a_setting_that_no_bundle_can_do_without(copy: Path) -> None:
    GPT2Config(n_embd=32, n_layer=1, n_head=2).save_pretrained(copy)
    change_config(copy, architectures=["GPT2LMHeadModel"])
    with pytest.raises(UnsupportedModel, match=r"copy: the configuration lacks a required setting: .*rope_parameters"):
        backbone_fingerprint(copy)
