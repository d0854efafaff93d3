"""Tiny random hybrids: one layer in four has attention, the others keep a state."""

from functools import partial
from pathlib import Path
from typing import Any

import transformers as hf

from tests.tiny_models import (
    FOUR_EXPERTS,
    HEADS,
    HIDDEN,
    KV_HEADS,
    QWEN_TOWER,
    TEXT_SIZES,
    qwen3_vl_processor,
    qwen_vl_tokenizer,
    save_random,
    save_tiny_text_model,
    text_sizes,
)

LAYERS = 8
WITH_ATTENTION = (3, 7)
_TEXT: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_QWEN: dict[str, Any] = {
    **TEXT_SIZES,
    **_TEXT,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,  # vLLM's operator on CPUs takes no smaller ones
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS = FOUR_EXPERTS | {"shared_expert_intermediate_size": 64}


def kinds(other: str) -> list[str]:
    return ["full_attention" if number in WITH_ATTENTION else other for number in range(LAYERS)]


def save_qwen3_5(folder: str | Path, **settings: Any) -> Path:
    """Gated DeltaNet."""
    return save_tiny_text_model(folder, partial(hf.Qwen3_5TextConfig, **_QWEN | settings))


def save_qwen3_5_with_pictures(folder: str | Path, *, with_experts: bool = False) -> Path:
    """Gated DeltaNet, M-RoPE on a quarter of each head, pictures; as published."""
    tokenizer, ids = qwen_vl_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = text_sizes(tokenizer) | _QWEN | (_EXPERTS if with_experts else {}) | {"rope_parameters": rope}
    vision = QWEN_TOWER | {"out_hidden_size": HIDDEN, "num_position_embeddings": 64}
    make_config = hf.Qwen3_5MoeConfig if with_experts else hf.Qwen3_5Config
    config = make_config(text_config=text, vision_config=vision, **ids, tie_word_embeddings=False)
    make_model = hf.Qwen3_5MoeForConditionalGeneration if with_experts else hf.Qwen3_5ForConditionalGeneration
    return save_random(make_model, config, qwen3_vl_processor(tokenizer), Path(folder), 0)


def save_qwen3_next(folder: str | Path) -> Path:
    """Gated DeltaNet, experts."""
    return save_tiny_text_model(folder, partial(hf.Qwen3NextConfig, **_QWEN, **_EXPERTS, norm_topk_prob=True))


def save_granite_hybrid(folder: str | Path) -> Path:
    """Mamba 2."""
    sizes = {"hidden_size": 128, "shared_intermediate_size": 192, "num_local_experts": 0, "num_experts_per_tok": 0}
    mamba = {
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 32,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 64,
    }
    rotated = {"position_embedding_type": "rope", "attention_multiplier": 32**-0.5}
    # Of eight random layers one prompt is 1.8e-4 off without any memory: rounding grows with every layer.
    layers = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
    settings = _TEXT | sizes | mamba | rotated | layers
    return save_tiny_text_model(folder, partial(hf.GraniteMoeHybridConfig, **settings))


def save_nemotron_h(folder: str | Path) -> Path:
    """Mamba 2, attention that rotates nothing, and layers of a perceptron alone."""
    mamba: dict[str, Any] = {
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 32,
        "chunk_size": 64,
    }
    mamba["time_step_min"] = 1e-9  # transformers raises shorter steps to it, and vLLM does not
    sizes = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "expand": 2}
    layers = {"layers_block_type": ["linear_attention", "mlp", "full_attention"] * 2}
    settings = {name: each for name, each in _TEXT.items() if name != "num_hidden_layers"} | mamba | sizes | layers
    return save_tiny_text_model(folder, partial(hf.NemotronHConfig, **settings))


def save_lfm2(folder: str | Path, **settings: Any) -> Path:
    """Short convolutions."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
    sizes |= {"conv_dim": 128, "block_dim": 128}  # published checkpoints have them, and vLLM reads them
    sizes |= {"tie_word_embeddings": True}  # vLLM takes it for granted
    return save_tiny_text_model(
        folder, partial(hf.Lfm2Config, **_TEXT | sizes | {"layer_types": kinds("conv")} | settings)
    )
