"""The demo model's architecture, tokenizer, processor and chat template, and its export with published tensor names."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    GenerationConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from benchmarks.demo.scenes import PICTURE

PATCH = 8
IMAGE_TOKENS = (PICTURE // PATCH) ** 2
VOCABULARY = 1024
CONTEXT = 4096
SPECIAL_TOKENS = ("<pad>", "<image>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD, IMAGE, SYSTEM, USER, ASSISTANT, END = range(len(SPECIAL_TOKENS))
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|' + message['role'] + '|>' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] in ['image', 'image_url'] -%}{{- '<image>' -}}
{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|end|>' if message['role'] != 'user' else '' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def build_config() -> LlavaConfig:
    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=3,
        image_size=PICTURE,
        patch_size=PATCH,
        projection_dim=192,
    )
    text = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=END,
        bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=IMAGE,
        vision_feature_layer=-1,  # the last layer, without CLIP's final norm: neither engine computes an unused layer
        vision_feature_select_strategy="default",
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=END,
    )


def build_model(seed: int) -> LlavaForConditionalGeneration:
    torch.manual_seed(seed)
    return LlavaForConditionalGeneration(build_config())


def build_tokenizer(texts: Iterable[str], words: Iterable[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (any UTF-8 text has an encoding) in which every one of `words` is a single token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    weight = 1000  # far above the counts in `texts`, so that words win over chance pairs
    listed = [form for word in sorted(words) for form in (word, " " + word)] * weight
    tokenizer.train_from_iterator([*listed, *texts], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<pad>", "<|end|>")],
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        extra_special_tokens={"image_token": "<image>"},
    )
    fast.chat_template = CHAT_TEMPLATE
    assert [fast.convert_tokens_to_ids(t) for t in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    return fast


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    image_processor = CLIPImageProcessor(
        size={"shortest_edge": PICTURE},
        crop_size={"height": PICTURE, "width": PICTURE},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # CLIP's class token, which the "default" strategy drops again
        chat_template=CHAT_TEMPLATE,
    )


def published_name(name: str) -> str | None:
    """The name a tensor has in published LLaVA checkpoints (and in vLLM), or None for the tied output layer."""
    if name == "lm_head.weight":
        return None
    part, _, rest = name.removeprefix("model.").partition(".")
    if part == "vision_tower":
        return f"vision_tower.vision_model.{rest.removeprefix('vision_model.')}"
    return f"language_model.model.{rest}" if part == "language_model" else f"{part}.{rest}"


def _write_weights(model: LlavaForConditionalGeneration, path: Path) -> None:
    tensors = {}
    for name, tensor in model.state_dict().items():
        published = published_name(name)
        if published is not None and not name.endswith("position_ids"):
            tensors[published] = tensor.detach().to(torch.float16).contiguous().clone()
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_settings(config: LlavaConfig, tokenizer: PreTrainedTokenizerFast, directory: Path, dtype: str) -> None:
    """A checkpoint but for its weights."""
    build_processor(tokenizer).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    settings = config.to_dict()
    settings["architectures"] = ["LlavaForConditionalGeneration"]
    for part in (settings, settings["text_config"], settings["vision_config"]):
        part["dtype"] = dtype
    (directory / "config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    GenerationConfig(eos_token_id=END, pad_token_id=PAD, do_sample=False).save_pretrained(directory)


def export(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, directory: Path) -> Path:
    """Writes a complete checkpoint, tensors stored as float16; swaps it in as a whole."""
    staging = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    # Engines compute in float32 unless told otherwise; float16 is only how the file is stored.
    write_settings(model.config, tokenizer, staging, "float32")
    _write_weights(model, staging / "model.safetensors")
    old = directory.with_name(directory.name + ".old")
    if directory.exists():
        os.replace(directory, old)
    os.replace(staging, directory)
    shutil.rmtree(old, ignore_errors=True)
    return directory
