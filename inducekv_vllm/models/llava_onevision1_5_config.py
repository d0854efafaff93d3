# mypy: disable-error-code="no-untyped-call"
"""The settings of LLaVA-OneVision-1.5 [https://arxiv.org/abs/2509.23661], with the names of published checkpoints."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PretrainedConfig, Qwen3Config
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

# What published files have in the settings of a part, and is the whole model's.
OF_THE_WHOLE = ("model_type", "image_token_id", "video_token_id")


@strict
class RiceConfig(Qwen2_5_VLVisionConfig):
    """The vision tower, RICE-ViT: every patch sees the whole picture, and there is one frame in a patch."""

    model_type = "rice_vit"
    attribute_map: ClassVar = {"num_attention_heads": "num_heads", "out_hidden_size": "text_hidden_size"}

    depth: int = 24
    hidden_size: int = 1024
    hidden_act: str = "gelu"
    intermediate_size: int = 4096
    temporal_patch_size: int = 1
    text_hidden_size: int = 2560
    layer_norm_eps: float = 1e-5


@strict
class LlavaOnevision15Config(PretrainedConfig):
    """A tower and a Qwen3, whose positions are one-dimensional."""

    model_type = "llavaonevision1_5"
    sub_configs: ClassVar = {"vision_config": RiceConfig, "text_config": Qwen3Config}
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]

    text_config: dict[str, Any] | PretrainedConfig | None = None
    vision_config: dict[str, Any] | PretrainedConfig | None = None
    image_token_id: int = 151655
    video_token_id: int = 151656
    vision_start_token_id: int = 151652
    vision_end_token_id: int = 151653
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.text_config = _part(Qwen3Config, self.text_config)
        self.vision_config = _part(RiceConfig, self.vision_config)
        super().__post_init__(**kwargs)


def _part(kind: type[PretrainedConfig], settings: dict[str, Any] | PretrainedConfig | None) -> PretrainedConfig:
    if isinstance(settings, PretrainedConfig):
        return settings
    return kind(**{name: value for name, value in (settings or {}).items() if name not in OF_THE_WHOLE})


def register() -> None:
    AutoConfig.register(RiceConfig.model_type, RiceConfig, exist_ok=True)
    AutoConfig.register(LlavaOnevision15Config.model_type, LlavaOnevision15Config, exist_ok=True)
