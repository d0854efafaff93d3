"""A tiny random model of every family that docs/models.md calls tested: see `tests.tiny_models`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from inducekv_vllm.models import register_model
from inducekv_vllm.models.deepseek_vl2 import DeepseekVLV2ForCausalLM
from inducekv_vllm.models.deepseek_vl2_config import CHAT_TEMPLATE, DeepseekVL2Config
from inducekv_vllm.models.llava_onevision1_5 import LLaVAOneVision1_5_ForConditionalGeneration
from inducekv_vllm.models.llava_onevision1_5_config import LlavaOnevision15Config
from tests.tiny_models import (
    FOUR_EXPERTS,
    HEADS,
    HIDDEN,
    PICTURE_SIZE,
    QWEN_TOWER,
    TEXT_SIZES,
    TOWER,
    byte_tokenizer,
    picture_template,
    qwen_vl_tokenizer,
    save_random,
    save_tiny_llava,
    save_tiny_qwen3_vl,
    save_tiny_text_model,
    text_sizes,
    use_published_names,
)

SMALL_TIMM = {"img_size": 56, "embed_dim": 64, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}
THREE_QUERY_HEADS = TEXT_SIZES | {"num_attention_heads": 6}  # for each KV head: no power of two
QWEN2_HIDDEN = 128  # vLLM's Qwen2 has heads of hidden size / query heads, and its CPU attention none below 32
QWEN2_SIZES = {"hidden_size": QWEN2_HIDDEN, "intermediate_size": 192, "head_dim": QWEN2_HIDDEN // HEADS}
EXPERTS = FOUR_EXPERTS | {"norm_topk_prob": True}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN2_EXPERTS = {**EXPERTS, "shared_expert_intermediate_size": 64}
AFMOE_EXPERTS = FOUR_EXPERTS | {
    "num_shared_experts": 1,
    "num_dense_layers": 1,
    "route_scale": 2.0,
    "mup_enabled": True,
    # As its published settings have it, which transformers' class does not name.
    "score_func": "sigmoid",
    "route_norm": True,
    "n_group": 1,
    "topk_group": 1,
}
ROUTED_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
GLM_EXPERTS = ROUTED_EXPERTS | {"use_qk_norm": True, "num_mtp_layers": 0}
HUNYUAN_ROPE = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}}
HUNYUAN_EXPERTS = {"num_experts": 4, "moe_topk": 2}
HY_EXPERTS = FOUR_EXPERTS | {
    "num_shared_experts": 1,
    # As its published settings have it, which transformers' class does not name.
    "first_k_dense_replace": 1,
    "expert_hidden_dim": 64,
    "route_norm": True,
    "qk_norm": True,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
MINISTRAL_ROPE = {"rope_parameters": YARN | {"rope_theta": 1e6, "factor": 16.0, "llama_4_scaling_beta": 0.1}}
MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
}
WINDOWS = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 16,
}

# Global layers with heads of another size and number, whose keys are their values; no embeddings for each layer.
GLOBAL_HEADS = {
    "attention_k_eq_v": True,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
}
LAGUNA = FOUR_EXPERTS | {
    "num_attention_heads_per_layer": [4, 8, 8, 4],
    "shared_expert_intermediate_size": 64,
    "moe_routed_scaling_factor": 2.0,
}
# As its published settings have it, which transformers' class does not name.
MINIMAX = {"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"}
MINIMAX |= {"rotary_dim": 32}
ERNIE_EXPERTS = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64, "moe_num_shared_experts": 1}
# Layers that see their chunk of a prompt, rotated, and layers that see all of it, not rotated.
CHUNKS = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "chunked_attention", "chunked_attention", "full_attention"],
    "no_rope_layers": [0, 1, 1, 0],
    "attention_chunk_size": 32,
}
LLAMA4 = {
    "intermediate_size": 64,
    "intermediate_size_mlp": 192,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "moe_layers": [1, 3],
}

# Multi-head latent attention: vLLM's for CPUs takes latents of 512 and rotated parts of 64 alone.
LATENTS = {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32}
LATENT_SIZES = {
    **{name: size for name, size in TEXT_SIZES.items() if name != "head_dim"},
    **LATENTS,
    **ROUTED_EXPERTS,
    "num_hidden_layers": 4,
    "num_key_value_heads": HEADS,
    "tie_word_embeddings": False,
    "n_group": 1,
    "topk_group": 1,
}


# vLLM's operator for RoPE on CPUs is wrong for latents; the reference backend runs on every CPU.
ON_CPUS: dict[str, Any] = {
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    "attention_backend": "CPU_MLA",
    "enforce_eager": True,
}


def save_text(folder: str | Path, config: type[Any], **settings: Any) -> Path:
    return save_tiny_text_model(folder, lambda **numbers: config(**settings, **numbers))


def save_deepseek_v3(folder: str | Path, config: type[Any] = hf.DeepseekV3Config, **settings: Any) -> Path:
    """Queries through a latent of their own, experts by groups, and the settings that transformers does not write."""
    sizes = LATENT_SIZES | {"q_lora_rank": 48, "n_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
    path = save_text(folder, config, **sizes | {"num_nextn_predict_layers": 0} | settings) / "config.json"
    routing = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    path.write_text(json.dumps({"first_k_dense_replace": 1} | json.loads(path.read_text()) | routing))
    return path.parent


def save_llava_onevision(folder: str | Path) -> Path:
    """Qwen2, pictures cut into tiles (anyres), a learned token at the end of each row of features."""
    tokenizer = byte_tokenizer(["<image>", "<video>"], picture_template("<image>"), video_token="<video>")
    pinpoints = [[PICTURE_SIZE, PICTURE_SIZE], [PICTURE_SIZE, 2 * PICTURE_SIZE], [2 * PICTURE_SIZE, PICTURE_SIZE]]
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(
            **TOWER, image_size=PICTURE_SIZE, patch_size=12, vision_use_head=False
        ).to_dict(),
        text_config=hf.Qwen2Config(**text_sizes(tokenizer) | QWEN2_SIZES).to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
    )
    size = {"height": PICTURE_SIZE, "width": PICTURE_SIZE}
    processor = hf.LlavaOnevisionProcessor(
        image_processor=hf.LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints),
        tokenizer=tokenizer,
        video_processor=hf.LlavaOnevisionVideoProcessor(size=size),
        num_image_tokens=(PICTURE_SIZE // 12) ** 2,
        vision_feature_select_strategy="full",
        chat_template=tokenizer.chat_template,
    )
    return use_published_names(
        save_random(hf.LlavaOnevisionForConditionalGeneration, config, processor, Path(folder), 0)
    )


def save_qwen2_5_vl(folder: str | Path) -> Path:
    """M-RoPE, and a vision tower with windows."""
    tokenizer, ids = qwen_vl_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    config = hf.Qwen2_5_VLConfig(
        text_config=text_sizes(tokenizer) | QWEN2_SIZES | {"rope_parameters": rope},
        vision_config={
            **QWEN_TOWER,
            "window_size": 32,
            "fullatt_block_indexes": [1],
            "out_hidden_size": QWEN2_HIDDEN,
        },
        **ids,
        tie_word_embeddings=False,
    )
    processor = qwen2_5_vl_processor(tokenizer)
    return save_random(hf.Qwen2_5_VLForConditionalGeneration, config, processor, Path(folder), 0)


def qwen2_5_vl_processor(tokenizer: hf.PreTrainedTokenizerFast, **sizes: int) -> hf.Qwen2_5_VLProcessor:
    all_sizes: dict[str, Any] = {"patch_size": 8, "size": {"shortest_edge": 32 * 32, "longest_edge": 96 * 96}, **sizes}
    return hf.Qwen2_5_VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(**all_sizes),
        tokenizer=tokenizer,
        video_processor=hf.Qwen2VLVideoProcessor(**all_sizes),
        chat_template=tokenizer.chat_template,
    )


def save_internvl(folder: str | Path) -> Path:
    """InternVL3: pixel shuffle before the projector, pictures in patches and a thumbnail."""
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = byte_tokenizer([*names.values()], picture_template("<IMG_CONTEXT>"), **names)
    config = hf.InternVLConfig(
        vision_config=hf.InternVLVisionConfig(**TOWER, image_size=PICTURE_SIZE, patch_size=12).to_dict(),
        text_config=hf.Qwen2Config(**text_sizes(tokenizer) | QWEN2_SIZES).to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    size = {"height": PICTURE_SIZE, "width": PICTURE_SIZE}
    processor = hf.InternVLProcessor(
        image_processor=hf.GotOcr2ImageProcessor(size=size, min_patches=1, max_patches=3, crop_to_patches=True),
        tokenizer=tokenizer,
        video_processor=hf.InternVLVideoProcessor(size=size),
        image_seq_length=4,
        chat_template=tokenizer.chat_template,
    )
    return save_random(hf.InternVLForConditionalGeneration, config, processor, Path(folder), 0)


def save_llava_onevision1_5(folder: str | Path) -> Path:
    """A tower with a class token, pictures of any size, and Qwen3 with one-dimensional positions."""
    tokenizer, ids = qwen_vl_tokenizer()
    config = LlavaOnevision15Config(
        text_config=text_sizes(tokenizer),
        vision_config={
            **QWEN_TOWER,
            "text_hidden_size": HIDDEN,
        },
        **ids,
    )
    processor = qwen2_5_vl_processor(tokenizer, temporal_patch_size=1)
    register_model("llavaonevision1_5")

    def make_model(config: Any) -> LLaVAOneVision1_5_ForConditionalGeneration:
        model = LLaVAOneVision1_5_ForConditionalGeneration(config)
        torch.nn.init.normal_(model.model.visual.class_embedding)
        return model

    return save_random(make_model, config, processor, Path(folder), 0)


def save_gemma3(folder: str | Path) -> Path:
    """With pictures, whose tokens see each other, and sliding windows."""
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    breaks = ["\n" * count for count in range(1, 5)]  # vLLM joins them around a picture
    tokenizer = byte_tokenizer([*names.values(), *breaks], picture_template("<start_of_image>"), **names)
    windows = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
    config = hf.Gemma3Config(
        text_config=hf.Gemma3TextConfig(**text_sizes(tokenizer) | windows, query_pre_attn_scalar=64),
        vision_config=hf.SiglipVisionConfig(**TOWER, image_size=56, patch_size=14, vision_use_head=False).to_dict(),
        mm_tokens_per_image=4,
        boi_token_index=tokenizer.convert_tokens_to_ids("<start_of_image>"),
        eoi_token_index=tokenizer.convert_tokens_to_ids("<end_of_image>"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image_soft_token>"),
        tie_word_embeddings=True,
    )
    processor = hf.Gemma3Processor(
        image_processor=hf.Gemma3ImageProcessor(size={"height": 56, "width": 56}, do_pan_and_scan=False),
        tokenizer=tokenizer,
        image_seq_length=4,
        chat_template=tokenizer.chat_template,
    )
    return use_published_names(save_random(hf.Gemma3ForConditionalGeneration, config, processor, Path(folder), 0))


def save_gemma4(folder: str | Path, **text: Any) -> Path:
    """Gemma 4 with its tower: pictures of any size, neighbouring patches pooled; `text` are other settings."""
    names = {f"{mark}_token": f"<{mark}>" for mark in ("boi", "eoi", "boa", "eoa", "audio")}
    tokenizer = byte_tokenizer(["<image>", *names.values(), "<|video|>"], picture_template("<image>"), **names)
    id_of = tokenizer.convert_tokens_to_ids
    tower = TOWER | {"num_key_value_heads": 2, "head_dim": 32, "patch_size": 4, "pooling_kernel_size": 2}
    config = hf.Gemma4Config(
        text_config=hf.Gemma4TextConfig(**text_sizes(tokenizer) | TEXT_SIZES | WINDOWS | GLOBAL_HEADS | text).to_dict(),
        vision_config=hf.Gemma4VisionConfig(**tower, default_output_length=70).to_dict(),
        **{f"{mark}_token_id": id_of(f"<{mark}>") for mark in ("boi", "eoi", "boa", "image", "audio")},
        video_token_id=id_of("<|video|>"),
        eoa_token_index=id_of("<eoa>"),
    )
    sizes = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    processor = hf.Gemma4Processor(
        feature_extractor=hf.Gemma4AudioFeatureExtractor(),
        image_processor=hf.Gemma4ImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=hf.Gemma4VideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
        image_seq_length=70,
    )
    return save_random(hf.Gemma4ForConditionalGeneration, config, processor, Path(folder), 0)


def save_mistral3(folder: str | Path) -> Path:
    """Mistral's text model behind Pixtral's tower: pictures of any size, by rows, neighbouring patches merged."""
    names = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    tokenizer = byte_tokenizer([*names.values()], picture_template("[IMG]"))
    config = hf.Mistral3Config(
        text_config=hf.Ministral3Config(**text_sizes(tokenizer) | TEXT_SIZES, **MINISTRAL_ROPE).to_dict(),
        vision_config=hf.PixtralVisionConfig(**TOWER, image_size=112, patch_size=14).to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        tie_word_embeddings=False,
    )
    processor = hf.PixtralProcessor(
        image_processor=hf.PixtralImageProcessor(patch_size={"height": 14, "width": 14}, size={"longest_edge": 112}),
        tokenizer=tokenizer,
        patch_size=14,
        spatial_merge_size=2,
        chat_template=tokenizer.chat_template,
        **names,
    )
    return save_random(hf.Mistral3ForConditionalGeneration, config, processor, Path(folder), 0)


def save_llama4(folder: str | Path) -> Path:
    """Llama 4 with its tower: pictures cut into tiles, patches shuffled together."""
    marks = ["<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>"]
    marks += ["<|tile_x_separator|>", "<|tile_y_separator|>"]
    tokenizer = byte_tokenizer(marks, picture_template("<|image|>"))
    tower = TOWER | {
        "intermediate_size": 256,
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    }
    ids = dict(zip(("boi_token_index", "eoi_token_index"), tokenizer.convert_tokens_to_ids(marks[:2]), strict=True))
    config = hf.Llama4Config(
        text_config=hf.Llama4TextConfig(**text_sizes(tokenizer) | TEXT_SIZES | CHUNKS | LLAMA4).to_dict(),
        vision_config=hf.Llama4VisionConfig(**tower, image_size=56, patch_size=14, pixel_shuffle_ratio=0.5).to_dict(),
        image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>"),
        **ids,
    )
    processor = hf.Llama4Processor(
        image_processor=hf.Llama4ImageProcessor(size={"height": 56, "width": 56}, max_patches=4),
        tokenizer=tokenizer,
        patch_size=14,
        chat_template=tokenizer.chat_template,
    )
    return save_random(hf.Llama4ForConditionalGeneration, config, processor, Path(folder), 0)


def save_deepseek_vl2(folder: str | Path, **language: Any) -> Path:
    """Plain heads, experts, and pictures cut into tiles; with the files and names of the published tiny model.

    `language` are other settings of the language model, as the small and the base model have them.

    Its tower has the size of the real one, unless `timm.create_model` makes a smaller one: see `small_timm`.
    """
    folder = Path(folder)
    grounding = ["<|ref|>", "<|/ref|>", "<|det|>", "<|/det|>", "<|grounding|>"]
    specials = ["<|begin|>", "<image>", *grounding, "<|User|>", "<|Assistant|>"]
    tokenizer = byte_tokenizer(specials, CHAT_TEMPLATE, bos_token="<|begin|>")
    tokenizer.chat_template = None
    text = {
        **{name: size for name, size in text_sizes(tokenizer).items() if name != "head_dim"},
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 128,
        "num_key_value_heads": HEADS,
        "bos_token_id": tokenizer.bos_token_id,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "topk_group": 1,
        "topk_method": "greedy",
        "use_mla": False,
        "lm_head": True,
        **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0),
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank")),
        **language,
    }
    settings = {
        "candidate_resolutions": [[56, 56], [56, 112], [112, 56], [168, 56]],
        "global_view_pos": "head",
        "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        "language_config": text,
        "model_type": "deepseek_vl_v2",
        "projector_config": {"model_type": "mlp_projector", "input_dim": SMALL_TIMM["embed_dim"], "n_embed": 128},
        "tile_tag": "2D",
        "vision_config": {
            "model_name": "siglip_so400m_patch14_384",
            "model_type": "vision",
            "image_size": 56,
            "patch_size": 14,
        },
    }
    register_model("deepseek_vl_v2")
    save_random(DeepseekVLV2ForCausalLM, DeepseekVL2Config(**settings), tokenizer, folder, 0)
    processing = {
        "processor_class": "DeepseekVLV2Processor",
        "candidate_resolutions": settings["candidate_resolutions"],
        "patch_size": 14,
        "downsample_ratio": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "image_token": "<image>",
        "normalize": True,
        "add_special_token": False,
        "ignore_id": -100,
        "mask_prompt": False,
        "pad_token": tokenizer.pad_token,
        "sft_format": "deepseek",
    }
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "processor_config.json").write_text(json.dumps(processing))
    return folder


@contextmanager
def small_timm() -> Iterator[None]:
    """Inside, timm makes small towers: DeepSeek-VL2's has one size in vLLM, with 400 million weights."""
    import timm

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(timm, "create_model", partial(timm.create_model, **SMALL_TIMM))
        yield


# What vLLM serves through its backend for models of transformers. It changes their classes in its process, and so the
# reference, if that is the test's.
THROUGH_TRANSFORMERS = (
    *("smollm3", "olmo2", "llava-onevision-1.5", "hunyuan", "hunyuan-moe", "seed-oss", "glm", "starcoder2", "arcee"),
    *("olmo3", "mellum", "phi", "jais2"),
)
# What vLLM's routing of experts on CPUs does not know: see `tests.engine.one_group`.
ROUTED_WITH_BIAS = ("ernie4.5-moe", "laguna", "minimax-m2")
TEXT_FAMILIES: dict[str, Callable[[str | Path], Path]] = {
    "llama": partial(save_text, config=hf.LlamaConfig, **THREE_QUERY_HEADS),
    "qwen3": partial(save_text, config=hf.Qwen3Config, **TEXT_SIZES),
    "qwen3-moe": partial(save_text, config=hf.Qwen3MoeConfig, **TEXT_SIZES, **EXPERTS),
    "phi3": partial(save_text, config=hf.Phi3Config, **THREE_QUERY_HEADS),
    "gemma": partial(save_text, config=hf.GemmaConfig, **THREE_QUERY_HEADS),
    "smollm3": partial(save_text, config=hf.SmolLM3Config, no_rope_layer_interval=2, **TEXT_SIZES),
    "olmo2": partial(save_text, config=hf.Olmo2Config, **TEXT_SIZES),
    "arcee": partial(save_text, config=hf.ArceeConfig, **TEXT_SIZES),
    "cohere": partial(save_text, config=hf.CohereConfig, use_qk_norm=True, logit_scale=1.0, **TEXT_SIZES),
    "ernie4.5": partial(save_text, config=hf.Ernie4_5Config, **TEXT_SIZES),
    "ernie4.5-moe": partial(save_text, config=hf.Ernie4_5_MoeConfig, **TEXT_SIZES, **ERNIE_EXPERTS),
    "glm": partial(save_text, config=hf.GlmConfig, **TEXT_SIZES),
    "glm4": partial(save_text, config=hf.Glm4Config, **TEXT_SIZES),
    "glm4-moe": partial(save_text, config=hf.Glm4MoeConfig, **TEXT_SIZES, **GLM_EXPERTS),
    "granite": partial(save_text, config=hf.GraniteConfig, **TEXT_SIZES, **MULTIPLIERS),
    "granite-moe": partial(
        save_text, config=hf.GraniteMoeConfig, **TEXT_SIZES | QWEN2_SIZES, **MULTIPLIERS, **LOCAL_EXPERTS
    ),
    "hunyuan": partial(save_text, config=hf.HunYuanDenseV1Config, **TEXT_SIZES, **HUNYUAN_ROPE),
    "hunyuan-moe": partial(save_text, config=hf.HunYuanMoEV1Config, **TEXT_SIZES, **HUNYUAN_ROPE, **HUNYUAN_EXPERTS),
    "hy3": partial(save_text, config=hf.HYV3Config, **TEXT_SIZES, **HY_EXPERTS),
    "hyperclovax": partial(save_text, config=hf.HyperCLOVAXConfig, **TEXT_SIZES),
    "jais2": partial(save_text, config=hf.Jais2Config, **TEXT_SIZES),
    "minimax-m2": partial(save_text, config=hf.MiniMaxM2Config, **TEXT_SIZES, **LOCAL_EXPERTS, **MINIMAX),
    "ministral3": partial(save_text, config=hf.Ministral3Config, **TEXT_SIZES, **MINISTRAL_ROPE),
    "mistral": partial(save_text, config=hf.MistralConfig, sliding_window=None, **TEXT_SIZES),
    "mixtral": partial(save_text, config=hf.MixtralConfig, **TEXT_SIZES, **LOCAL_EXPERTS),
    "olmoe": partial(
        save_text, config=hf.OlmoeConfig, **TEXT_SIZES | QWEN2_SIZES, num_experts=4, num_experts_per_tok=2
    ),
    "phi": partial(save_text, config=hf.PhiConfig, **TEXT_SIZES),
    "qwen2": partial(save_text, config=hf.Qwen2Config, **TEXT_SIZES | QWEN2_SIZES),
    "qwen2-moe": partial(save_text, config=hf.Qwen2MoeConfig, **TEXT_SIZES | QWEN2_SIZES, **QWEN2_EXPERTS),
    "seed-oss": partial(save_text, config=hf.SeedOssConfig, **TEXT_SIZES),
    "stablelm": partial(save_text, config=hf.StableLmConfig, **TEXT_SIZES | QWEN2_SIZES),
    "starcoder2": partial(save_text, config=hf.Starcoder2Config, sliding_window=None, **TEXT_SIZES),
}
# With sliding windows or chunks in some layers: decoupled memory alone.
WINDOWED_FAMILIES: dict[str, Callable[[str | Path], Path]] = {
    "gemma4": partial(save_text, config=hf.Gemma4TextConfig, **TEXT_SIZES | WINDOWS, **GLOBAL_HEADS),
    "laguna": partial(save_text, config=hf.LagunaConfig, **TEXT_SIZES | WINDOWS, **LAGUNA),
    "llama4": partial(save_text, config=hf.Llama4TextConfig, **TEXT_SIZES | CHUNKS | LLAMA4),
    "afmoe": partial(save_text, config=hf.AfmoeConfig, **TEXT_SIZES | WINDOWS, **AFMOE_EXPERTS),
    "exaone4": partial(save_text, config=hf.Exaone4Config, **TEXT_SIZES | WINDOWS, sliding_window_pattern="LG"),
    "mellum": partial(save_text, config=hf.MellumConfig, **TEXT_SIZES | WINDOWS, **EXPERTS),
    "olmo3": partial(save_text, config=hf.Olmo3Config, **TEXT_SIZES | WINDOWS),
}
PICTURE_FAMILIES: dict[str, Callable[[str | Path], Path]] = {
    "llava-1.5": partial(save_tiny_llava, k_norm=False, kv_heads=HEADS),
    "llava-onevision": save_llava_onevision,
    "qwen2.5-vl": save_qwen2_5_vl,
    "qwen3-vl": save_tiny_qwen3_vl,
    "internvl": save_internvl,
    "llava-onevision-1.5": save_llava_onevision1_5,
    "deepseek-vl2": save_deepseek_vl2,
    "mistral3": save_mistral3,
    "llama4-vl": save_llama4,
    "gemma4-vl": save_gemma4,
}
LATENT_FAMILIES: dict[str, Callable[[str | Path], Path]] = {
    "deepseek-v2": partial(
        save_text,
        config=hf.DeepseekV2Config,
        **LATENT_SIZES,
        q_lora_rank=None,
        first_k_dense_replace=1,
        topk_method="greedy",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
    ),
    "deepseek-v3": partial(save_deepseek_v3, first_k_dense_replace=1),
    "deepseek-v3-yarn": partial(save_deepseek_v3, rope_parameters=YARN),  # as it is published
    "glm4-moe-lite": partial(save_deepseek_v3, config=hf.Glm4MoeLiteConfig, n_group=1),
    "deepseek-vl2-small": partial(save_deepseek_vl2, **LATENTS, use_mla=True),
    "deepseek-vl2-base": partial(
        save_deepseek_vl2,
        **LATENTS,
        use_mla=True,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.0,
    ),
}
LATENT_PICTURES = ("deepseek-vl2-small", "deepseek-vl2-base")
DECOUPLED_ALONE = (*WINDOWED_FAMILIES, "llama4-vl", "gemma4-vl")
FAMILIES = TEXT_FAMILIES | WINDOWED_FAMILIES | PICTURE_FAMILIES
