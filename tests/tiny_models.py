"""Tiny random models for tests, generated without a download. They load in transformers and in vLLM.

    python -m tests.tiny_models llava /tmp/tiny-llava

The weights are wide enough that outputs differ between inputs and attention is neither flat nor one-hot. A parity test
on a model with uniform logits would pass on wrong code.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

PICTURE_SIZE = 48
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 96, 3, 4, 2, 64
TEXT_SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 4096,
}
FOUR_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
# Of what sees pictures; two heads, so that two tensor-parallel ranks can share them.
TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN_TOWER = {"hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 2, "patch_size": 8}

_CORPUS = (
    "What colour is the circle? How many squares are there? Is the red triangle left of the blue one?",
    "Answer with one word. Answer in a sentence. The picture shows two green stars and a yellow ring.",
    "system user assistant 0 1 2 3 4 5 6 7 8 9 yes no",
)
_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% for part in message['content'] %}{% if part['type'] in ('image', 'image_url') %}IMAGE\
{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# As text-only models have it: a message's content is a string.
_TEXT_TEMPLATE = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] \
+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def save_tiny_llava(folder: str | Path, *, k_norm: bool = True, kv_heads: int = KV_HEADS, seed: int = 0) -> Path:
    """A LLaVA with a CLIP tower and a Qwen3 text model, or a Llama text model without `k_norm`."""
    folder = Path(folder)
    tokenizer = byte_tokenizer(["<image>"], picture_template("<image>"))
    text = text_sizes(tokenizer) | {"tie_word_embeddings": False, "num_key_value_heads": kv_heads}
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**TOWER, image_size=PICTURE_SIZE, patch_size=12, projection_dim=64),
        text_config=hf.Qwen3Config(**text) if k_norm else hf.LlamaConfig(**text),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
        tie_word_embeddings=False,
    )
    image_processor = hf.CLIPImageProcessor(
        size={"shortest_edge": PICTURE_SIZE}, crop_size={"height": PICTURE_SIZE, "width": PICTURE_SIZE}
    )
    processor = hf.LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=12,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
    return use_published_names(save_random(hf.LlavaForConditionalGeneration, config, processor, folder, seed))


def save_tiny_qwen3_vl(folder: str | Path, *, seed: int = 0) -> Path:
    """A Qwen3-VL with a deepstack level and interleaved multimodal RoPE."""
    folder = Path(folder)
    tokenizer, ids = qwen_vl_tokenizer()
    config = hf.Qwen3VLConfig(
        text_config=text_sizes(tokenizer)
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [12, 10, 10],
                "mrope_interleaved": True,
            }
        },
        vision_config={
            **QWEN_TOWER,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": HIDDEN,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        **ids,
        tie_word_embeddings=False,
    )
    processor = qwen3_vl_processor(tokenizer)
    return save_random(hf.Qwen3VLForConditionalGeneration, config, processor, folder, seed)


def qwen3_vl_processor(tokenizer: hf.PreTrainedTokenizerFast) -> hf.Qwen3VLProcessor:
    sizes: dict[str, Any] = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    sizes |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"shortest_edge": 1024, "longest_edge": 9216}}
    return hf.Qwen3VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=hf.Qwen3VLVideoProcessor(**sizes),
        chat_template=tokenizer.chat_template,
    )


def save_tiny_text_model(folder: str | Path, make_config: Callable[..., hf.PretrainedConfig], *, seed: int = 0) -> Path:
    """A text-only model of any architecture; `make_config` takes the tokenizer's numbers."""
    tokenizer = byte_tokenizer([], _TEXT_TEMPLATE)
    config = make_config(**numbers_of(tokenizer))
    return save_random(hf.AutoModelForCausalLM.from_config, config, tokenizer, Path(folder), seed)


def save_tiny_llama(folder: str | Path, *, seed: int = 0) -> Path:
    """A text-only Llama, smaller than the others."""

    def make_config(**numbers: Any) -> hf.LlamaConfig:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
        return hf.LlamaConfig(**sizes, num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, **numbers)

    return save_tiny_text_model(folder, make_config, seed=seed)


TINY_MODELS: dict[str, Callable[[str | Path], Path]] = {
    "llava": save_tiny_llava,
    "llava-llama": lambda folder: save_tiny_llava(folder, k_norm=False),
    "qwen3-vl": save_tiny_qwen3_vl,
}


def picture(seed: int, width: int = PICTURE_SIZE, height: int = PICTURE_SIZE) -> Image.Image:
    """An image of random coloured blocks, different for every seed."""
    blocks = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def picture_template(mark: str) -> str:
    """A chat template that takes a list of parts and prints `mark` for a picture."""
    return _TEMPLATE.replace("IMAGE", mark)


def text_sizes(tokenizer: hf.PreTrainedTokenizerFast) -> dict[str, Any]:
    """Settings of a text model that all families name alike."""
    return TEXT_SIZES | numbers_of(tokenizer)


def numbers_of(tokenizer: hf.PreTrainedTokenizerFast) -> dict[str, Any]:
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return {"vocab_size": len(tokenizer), **ends}


def qwen_vl_tokenizer() -> tuple[hf.PreTrainedTokenizerFast, dict[str, int]]:
    """And the ids of the tokens around pictures and in their place, as Qwen-VL's settings name them."""
    names = {
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
    }
    tokenizer = byte_tokenizer([*names.values()], picture_template("<|vision_start|><|image_pad|><|vision_end|>"))
    return tokenizer, {setting: tokenizer.convert_tokens_to_ids(token) for setting, token in names.items()}


def byte_tokenizer(specials: list[str], chat_template: str, **attributes: str) -> hf.PreTrainedTokenizerFast:
    """A byte-level BPE that encodes every text and has single tokens for a few words of the corpus.

    `attributes` are names of special tokens by which processors look them up.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *specials]
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=specials,
        chat_template=chat_template,
        model_max_length=4096,
        # Processors look these up on the tokenizer.
        **{name.strip("<|>") + "_token": name for name in specials if name == "<image>"},
        **attributes,
    )


def save_random(make_model: Callable[[Any], Any], config: Any, processor: Any, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = make_model(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # matrices and convolutions; norms and biases keep their values
                parameter.normal_(0.0, 1.5 / parameter[0].numel() ** 0.5)
        for name, weight in model.state_dict().items():
            # By it experts are chosen. With Laguna's, vLLM 0.32 is 1.8e-3 off without any memory.
            if name.endswith("e_score_correction_bias") and weight.ndim == 1 and config.model_type != "laguna":
                weight.normal_(0.0, 0.1)
    model.generation_config = hf.GenerationConfig(
        eos_token_id=config.get_text_config().eos_token_id, pad_token_id=config.get_text_config().pad_token_id
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def use_published_names(folder: Path) -> Path:
    """transformers 5 saves the tower as `vision_tower.*`; published checkpoints and vLLM add `vision_model.`."""
    weights = folder / "model.safetensors"
    tensors = {
        re.sub(r"^vision_tower\.(?!vision_model\.)", "vision_tower.vision_model.", name): tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(tensors, weights, metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    print(TINY_MODELS[sys.argv[1]](sys.argv[2]))
