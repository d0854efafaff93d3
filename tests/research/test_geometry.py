"""The footprint formula and its table, against the figures the paper prints."""

from typing import Any

import pytest

from benchmarks.research.continual.geometry import TextGeometry, plan, text_geometry


def qwen(model_type: str, text_type: str, hidden_size: int) -> dict[str, Any]:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    text = {"model_type": text_type, "hidden_size": hidden_size, "num_hidden_layers": 36, **heads}
    return {"model_type": model_type, "text_config": text}


def deepseek(layers: int, hidden_size: int, heads: int) -> dict[str, Any]:
    language = {
        "model_type": "deepseek_v2",
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "v_head_dim": 0,
        "kv_lora_rank": None,
    }
    return {"model_type": "deepseek_vl_v2", "vision_config": {"model_type": "vision"}, "language_config": language}


MIB_4B, MIB_8B = (72.31, 144.62, 289.25, 578.50), (72.50, 145.00, 290.00, 580.00)
CONFIGS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "LLaVA-OneVision-1.5-4B": (qwen("llavaonevision1_5", "LLaVAOneVision1_5_text", 2560), MIB_4B),
    "LLaVA-OneVision-1.5-8B": (qwen("llavaonevision1_5", "LLaVAOneVision1_5_text", 4096), MIB_8B),
    "Qwen3-VL-4B": (qwen("qwen3_vl", "qwen3_vl_text", 2560), MIB_4B),
    "Qwen3-VL-8B": (qwen("qwen3_vl", "qwen3_vl_text", 4096), MIB_8B),
    "DeepSeek-VL2-tiny": (deepseek(12, 1280, 10), (30.16, 60.31, 120.62, 241.25)),
    "DeepSeek-VL2-small": (deepseek(27, 2048, 16), (108.25, 216.50, 433.00, 866.00)),
}


@pytest.mark.parametrize("model", CONFIGS)
def test_the_table_of_the_paper(model: str) -> None:
    config, mebibytes = CONFIGS[model]
    rows = plan(text_geometry(config))
    assert [row.budget for row in rows] == [64, 128, 256, 512]
    assert [row.tokens for row in rows] == [512, 1024, 2048, 4096]
    assert [f"{row.mebibytes:.2f}" for row in rows] == [f"{size:.2f}" for size in mebibytes]


def test_latents_are_counted_as_they_are_stored() -> None:
    """A token of latent attention (MLA) has 576 + 512 numbers a layer; the paper counts those of each head."""
    config, mebibytes = CONFIGS["DeepSeek-VL2-small"]
    latents = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    geometry = text_geometry({**config, "language_config": config["language_config"] | latents})
    assert (geometry.num_kv_heads, geometry.head_dim, geometry.value_dim) == (1, 576, 512)
    assert geometry.per_head is not None
    assert [f"{row.mebibytes:.2f}" for row in plan(geometry.per_head)] == [f"{size:.2f}" for size in mebibytes]
    assert plan(geometry)[0].bytes == 64 * (2 * 2048 + 2 * 27 * 8 * (576 + 512))


def test_sizes_that_are_left_out() -> None:
    """LLaVA 1.5's file names the text model and hardly a size; transformers knows its class."""
    flat = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    assert text_geometry(flat) == TextGeometry(num_layers=2, num_kv_heads=4, head_dim=16, hidden_size=64)
    config = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    assert text_geometry(config) == TextGeometry(num_layers=32, num_kv_heads=32, head_dim=128, hidden_size=4096)


def test_layers_of_different_sizes() -> None:
    """Memory is in the global layers alone. Gemma 4's file has the size of their heads under another name."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    sizes |= {"num_key_value_heads": 2}
    config = {"model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"], **sizes}
    assert text_geometry(config) == TextGeometry(num_layers=1, num_kv_heads=2, head_dim=512, hidden_size=64)
    same = text_geometry({**config, "global_head_dim": 16})
    assert same == TextGeometry(num_layers=2, num_kv_heads=2, head_dim=16, hidden_size=64)
    global_heads = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    assert text_geometry({**config, **global_heads}).num_kv_heads == 1
