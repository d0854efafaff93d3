"""LLaVA-OneVision-1.5: a made-up checkpoint with published names and settings, and the tower against a plain twin."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear
from transformers import AutoConfig, AutoModelForImageTextToText

from inducekv_vllm.backbone.checkpoints import load_config
from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.models import ARCHITECTURES, register_model
from selector.backbone.model import Backbone
from tests.tiny_families import save_llava_onevision1_5

Weights = dict[str, Tensor]
PATCH, HEADS, MERGE = 8, 2, 2
LINEAR = ("weight", "bias")


def published_names(vision_layers: int, text_layers: int) -> Iterator[str]:
    yield from ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")
    yield from ("visual.patch_embed.proj.weight", "visual.class_embedding", "visual.class_pos_emb")
    of_blocks = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    modules = [f"blocks.{layer}.{name}" for layer in range(vision_layers) for name in of_blocks]
    for module in ("pre_layernorm", "merger.ln_q", "merger.mlp.0", "merger.mlp.2", *modules):
        yield from (f"visual.{module}.{name}" for name in LINEAR)
    attention = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    others = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm")
    for layer in range(text_layers):
        yield from (f"model.layers.{layer}.{name}.weight" for name in (*attention, *others))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llava_onevision1_5(tmp_path_factory.mktemp("llava-onevision-1.5"))


def as_published(settings: dict[str, Any]) -> dict[str, Any]:
    """As transformers 4 wrote settings, with the code of the hub, and with the whole model's settings in its parts."""
    text, vision = dict(settings["text_config"]), dict(settings["vision_config"])
    text |= {"model_type": "LLaVAOneVision1_5_text", "rope_theta": text.pop("rope_parameters")["rope_theta"]}
    text |= {"rope_scaling": None, "image_token_id": None, "video_token_id": None}
    vision.pop("rope_parameters")
    code = "configuration_llavaonevision1_5.Llavaonevision1_5Config"
    whole = {key: value for key, value in settings.items() if key not in ("dtype", "transformers_version")}
    return whole | {
        "auto_map": {"AutoConfig": code},
        "torch_dtype": "float32",
        "text_config": text,
        "vision_config": {**vision, "embed_dim": vision["hidden_size"]},
    }


def test_a_checkpoint_with_published_names_and_settings_is_the_same_model(tiny: Path, tmp_path: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    settings = json.loads((tiny / "config.json").read_text())
    layers = settings["vision_config"]["depth"], settings["text_config"]["num_hidden_layers"]
    assert set(weights) == set(published_names(*layers))
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(as_published(settings)))
    register_model("llavaonevision1_5")
    found, loading = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert found.config.vision_config.layer_norm_eps == settings["vision_config"]["layer_norm_eps"]
    assert found.config.text_config.rope_parameters["rope_theta"] == 10000.0
    own, theirs = Backbone.load(tiny), Backbone.load(tmp_path)
    ids = {"input_ids": torch.arange(20, 60)[None]}
    assert torch.equal(own.model(**ids).logits, theirs.model(**ids).logits)
    assert backbone_fingerprint(tmp_path) == backbone_fingerprint(tiny)


def test_the_towers_features_are_those_of_a_plain_twin(tiny: Path) -> None:
    """Two pictures of different sizes, and a video of three frames, whose patches see their own frame alone."""
    grids = torch.tensor([[1, 4, 6], [1, 2, 2], [3, 4, 2]])
    pixels = torch.randn(int(grids.prod(1).sum()), 3 * PATCH * PATCH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = Backbone.load(tiny).model.model.visual(pixels, grid_thw=grids).pooler_output
    weights = {
        name.removeprefix("visual."): tensor.double()
        for name, tensor in load_file(tiny / "model.safetensors").items()
        if name.startswith("visual.")
    }
    frames = [(rows, columns) for count, rows, columns in grids.tolist() for _ in range(count)]
    parts = pixels.double().split([rows * columns for rows, columns in frames])
    expected = torch.cat([features(weights, *each) for each in zip(parts, frames, strict=True)])
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


def features(weights: Weights, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Of one frame, token by token; its patches come in squares of `MERGE` x `MERGE`, as the processor orders them."""

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-5)

    def dense(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    rows, columns = grid
    places = [
        (square_row * MERGE + row, square_column * MERGE + column)
        for square_row in range(rows // MERGE)
        for square_column in range(columns // MERGE)
        for row in range(MERGE)
        for column in range(MERGE)
    ]
    patches = pixels @ weights["patch_embed.proj.weight"].flatten(1).T  # [P, d]
    x = torch.cat([weights["class_embedding"][None], patches])  # [1 + P, d]
    D = x.shape[1] // HEADS
    frequencies = [10000.0 ** -(2 * number / (D // 2)) for number in range(D // 4)]
    own = [[place[axis] * f for axis in range(2) for f in frequencies] for place in places]
    angles = torch.cat([weights["class_pos_emb"], torch.tensor(own, dtype=torch.float64)])  # [1 + P, D / 2]

    def turned(t: Tensor) -> Tensor:
        """[1 + P, heads, D]: pairs of the first and the second half, turned by the angles."""
        first, second = t.chunk(2, dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    x = norm(x, "pre_layernorm")
    for layer in range(2):
        at = f"blocks.{layer}."
        q, k, v = dense(norm(x, at + "norm1"), at + "attn.qkv").view(len(x), 3, HEADS, D).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", turned(q), turned(k)) / D**0.5
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v).flatten(1)
        x = x + dense(mixed, at + "attn.proj")
        x = x + dense(gelu(dense(norm(x, at + "norm2"), at + "mlp.fc1")), at + "mlp.fc2")
    squares = norm(x[1:], "merger.ln_q").view(rows * columns // MERGE**2, -1)
    return dense(gelu(dense(squares, "merger.mlp.0")), "merger.mlp.2")


def test_another_architecture_of_the_same_type_is_refused(tiny: Path, tmp_path: Path) -> None:
    settings = json.loads((tiny / "config.json").read_text()) | {"architectures": ["RiceModel"]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match=r"expected a model that generates text .*found RiceModel"):
        load_config(tmp_path)


def test_names_are_those_of_published_files() -> None:
    assert ARCHITECTURES["llavaonevision1_5"] == "LLaVAOneVision1_5_ForConditionalGeneration"
    assert AutoConfig.for_model("llavaonevision1_5").vision_config.depth == 24
