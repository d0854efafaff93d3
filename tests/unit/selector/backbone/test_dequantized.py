"""Quantised checkpoints are loaded as the floats that they stand for, exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.errors import UnsupportedModel
from selector.backbone.model import Backbone
from tests.quantized import METHODS, save_quantized
from tests.tiny_families import FAMILIES, TEXT_SIZES, save_text


@pytest.mark.parametrize("method", METHODS)
def test_the_floats(method: str, tmp_path: Path) -> None:
    plain = backbone_fingerprint(FAMILIES["llama"](tmp_path))
    floats = save_quantized(tmp_path, method)
    backbone = Backbone.load(tmp_path)
    loaded = backbone.model.state_dict()
    for name, expected in floats.items():
        torch.testing.assert_close(loaded[name], expected.float(), rtol=0, atol=0)
    assert backbone.fingerprint == backbone_fingerprint(tmp_path)
    assert [each.split(":")[0] for each in backbone.fingerprint.differences(plain)] == ["weights_digest"]


def test_nvfp4_beside_the_decompression_of_compressed_tensors() -> None:
    """Which rounds scales and products to bfloat16."""
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    parts, floats = METHODS["nvfp4-pack-quantized"][0](weight)
    settings = METHODS["nvfp4-pack-quantized"][1]["config_groups"]["group_0"]
    theirs = NVFP4PackedCompressor.decompress(dict(parts), QuantizationScheme(**settings))["weight"]
    torch.testing.assert_close(floats, theirs.float(), rtol=2**-7, atol=0)
    assert (floats - weight).abs().max() < weight.abs().max() / 6


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def in_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of experts' weights [E, in, out]: blocks [E, out, in / 32, 16], the exponents of their scales, and the floats."""
    groups = weight.transpose(1, 2).float().unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(-1).clamp(min=1e-8) / 6).log2().ceil()
    scales = torch.exp2(exponents)[..., None]
    numbers = (groups / scales)[..., None].sub(E2M1).abs().argmin(-1)
    blocks = (numbers[..., 0::2] | (numbers[..., 1::2] << 4)).to(torch.uint8)
    floats = (E2M1[numbers] * scales).flatten(2).transpose(1, 2).contiguous()
    return blocks, (exponents + 127).to(torch.uint8), floats


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """Its experts in MXFP4, everything else in 16 bits."""
    folder = save_text(tmp_path, GptOssConfig, **TEXT_SIZES, num_local_experts=2, num_experts_per_tok=1)
    stored, floats = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = floats[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            blocks, exponents, floats[name] = in_mxfp4(stored.pop(name))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": kept}}
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    backbone = Backbone.load(folder)
    for name, expected in floats.items():
        assert backbone.model.state_dict()[name].dtype == torch.float32
        torch.testing.assert_close(backbone.model.state_dict()[name], expected.float(), rtol=0, atol=0)
    assert backbone.fingerprint == backbone_fingerprint(folder)


def test_experts_and_pictures(tmp_path: Path) -> None:
    """Weights of experts are gathered as those of a plain checkpoint; a tower that is not quantised stays."""
    for family in ("qwen3-moe", "llava-onevision"):
        folder = FAMILIES[family](tmp_path / family)
        expected = Backbone.load(folder).model.state_dict()
        save_quantized(folder, "awq")
        loaded = Backbone.load(folder).model.state_dict()
        assert loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert loaded[name].shape == tensor.shape
            assert (loaded[name] - tensor).abs().max() <= tensor.abs().max() / 5  # of 16 levels


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("awq", {"version": "gemv"}, "by awq with settings that are not known: expected AWQ of 4 bits in the version"),
        ("gptq", {"sym": False}, "by gptq with settings that are not known: .* symmetric GPTQ of 4 or 8 bits"),
        ("gptq", {"bits": 3}, "by gptq with settings that are not known"),
        ("gptq", {"dynamic": {"-:.*": {}}}, "by gptq with settings that are not known"),
        ("modelopt-fp8", {"quant_algo": "MXFP8"}, r"or ModelOpt's FP8, NVFP4, MIXED_PRECISION; found .*'MXFP8'"),
        ("gptq", {"bits": 8}, r"the quantised weights of model\.layers\.\d.* do not fit"),
        (
            "gptq",
            {"quant_method": "aqlm"},
            r"its weights are quantised \(aqlm\): expected plain weights, or .* modelopt or mxfp4",
        ),
    ],
)
def test_settings_that_are_not_known(method: str, changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    save_quantized(FAMILIES["llama"](tmp_path), method)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=reason):
        Backbone.load(tmp_path)


def test_a_layer_without_its_scales(tmp_path: Path) -> None:
    save_quantized(FAMILIES["llama"](tmp_path), "awq")
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.scales"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"weights of model\.layers\.1\.mlp\.up_proj do not fit: 'scales'"):
        Backbone.load(tmp_path)


def test_plain_weights_that_are_said_to_be_quantised(tmp_path: Path) -> None:
    config = FAMILIES["llama"](tmp_path) / "config.json"
    settings = {"quantization_config": METHODS["gptq"][1]}
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    with pytest.raises(UnsupportedModel, match=r"config\.json says that its weights are quantised by gptq, found none"):
        Backbone.load(tmp_path)
