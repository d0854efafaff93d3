"""DeepSeek-VL2: a made-up checkpoint with published names and settings, its tiles, and what is refused."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from inducekv_vllm.backbone.checkpoints import load_tokenizer
from inducekv_vllm.backbone.fingerprint import backbone_fingerprint
from inducekv_vllm.backbone.placeholders import placeholder_ids
from inducekv_vllm.errors import UnsupportedModel
from inducekv_vllm.models.deepseek_vl2_config import DeepseekVL2Config
from inducekv_vllm.models.deepseek_vl2_processor import DeepseekVLV2Processor
from selector.backbone.model import Backbone
from tests.tiny_families import save_deepseek_vl2, small_timm

# Of the published models; width and height in pixels.
PUBLISHED = [(384, 384), (384, 768), (768, 384), (384, 1152), (1152, 384), (384, 1536), (768, 768), (1536, 384)]
LINEAR = ("weight", "bias")
EXPERT = ("gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with small_timm():
        yield save_deepseek_vl2(tmp_path_factory.mktemp("deepseek-vl2"))


def changed(tiny: Path, folder: Path, **settings: Any) -> Path:
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    known = json.loads((tiny / "config.json").read_text())
    kept = {name: value for name, value in (known | settings).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def published_names(text_layers: int) -> Iterator[str]:
    yield from ("image_newline", "view_seperator", "vision.pos_embed", "vision.attn_pool.latent")
    yield from ("language.lm_head.weight", "language.model.embed_tokens.weight", "language.model.norm.weight")
    of_blocks = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    blocks = [f"vision.blocks.{layer}.{name}" for layer in range(2) for name in of_blocks]
    pool = [f"vision.attn_pool.{name}" for name in ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")]
    others = ("vision.norm", "vision.patch_embed.proj", "projector.layers.0", "projector.layers.2")
    yield from (f"{module}.{name}" for module in (*blocks, *pool, *others) for name in LINEAR)
    for layer in range(text_layers):
        at = f"language.model.layers.{layer}"
        yield from (f"{at}.self_attn.{name}_proj.weight" for name in "qkvo")
        yield from (f"{at}.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm"))
        parts = ["mlp"] if layer == 0 else ["mlp.shared_experts", *[f"mlp.experts.{number}" for number in range(4)]]
        yield from (f"{at}.{part}.{name}.weight" for part in parts for name in EXPERT)
        if layer > 0:
            yield f"{at}.mlp.gate.weight"


def test_names_are_those_of_published_files(tiny: Path) -> None:
    assert set(load_file(tiny / "model.safetensors")) == set(published_names(3))


def test_a_tokenizer_without_a_template_gets_vllms(tiny: Path) -> None:
    tokenizer: Any = load_tokenizer(tiny)
    question = [{"role": "user", "content": "Why?"}]
    written = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    assert written == "<|begin|><|User|>: Why?\n\n<|Assistant|>: "
    assert backbone_fingerprint(tiny) == Backbone.load(tiny).fingerprint


@pytest.mark.parametrize(
    ("size", "of", "tiled", "tokens"),
    [
        ((384, 384), 1, (384, 384), 14 * 15 + 1 + 14 * 15),
        ((768, 384), 1, (768, 384), 14 * 15 + 1 + 14 * 29),
        ((384, 768), 2, (384, 768), 14 * 15 + 1 + 28 * 15),
        ((1000, 1000), 1, (768, 768), 14 * 15 + 1 + 28 * 29),
        ((100, 100), 1, (384, 384), 14 * 15 + 1 + 14 * 15),  # every candidate keeps all of it
        ((3000, 500), 1, (1536, 384), 14 * 15 + 1 + 14 * 57),
        ((3000, 500), 3, (384, 384), 14 * 15 + 1 + 14 * 15),
    ],
)
def test_tiles_of_published_resolutions(
    tiny: Path, size: tuple[int, int], of: int, tiled: tuple[int, int], tokens: int
) -> None:
    processor = DeepseekVLV2Processor(PreTrainedTokenizerFast.from_pretrained(tiny), PUBLISHED)
    assert processor.tiled_size(size, of=of) == tiled
    assert processor.num_tokens(*tiled) == tokens


def test_the_mark_of_a_picture_is_known_without_a_setting(tiny: Path) -> None:
    assert placeholder_ids(DeepseekVL2Config()) == {128815}
    assert placeholder_ids(DeepseekVL2Config(image_token_id=4)) == {4}


def test_another_mark_than_the_processors_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = changed(tiny, tmp_path, image_token_id=None)
    with pytest.raises(UnsupportedModel, match=r"writes token 4 for a picture, expected one of \[128815\]"):
        Backbone.load(folder)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"language_config": {"kv_lora_rank": 512, "topk_method": "noaux_tc"}},
            r"noaux_tc and sigmoid, found \('noaux_tc', 'softmax'\)",
        ),
        ({"language_config": {"kv_lora_rank": 512, "norm_topk_prob": True}}, "expected norm_topk_prob false"),
        ({"tile_tag": "1D"}, "expected tile_tag '2D'"),
        ({"projector_config": {"projector_type": "linear"}}, "expected the projector 'downsample_mlp_gelu'"),
    ],
)
def test_other_settings_are_refused(tiny: Path, tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        Backbone.load(changed(tiny, tmp_path, **settings))


def test_a_missing_timm_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UnsupportedModel, match="needs the package timm"):
        Backbone.load(tiny)
