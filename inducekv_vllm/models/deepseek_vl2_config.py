# mypy: disable-error-code="no-untyped-call"
"""The settings of DeepSeek-VL2 [https://arxiv.org/abs/2412.10302], with the names of published checkpoints."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, PretrainedConfig
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig
from transformers.models.deepseek_v2.configuration_deepseek_v2 import DeepseekV2Config

from ..errors import UnsupportedModel
from . import IMAGE_TOKENS

# Published checkpoints have no chat template; vLLM writes their prompts like this.
CHAT_TEMPLATE = """{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}\
{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}\
{{ bos_token + system }}{% for message in turns %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('The roles must alternate: user, assistant, user, ...') }}{% endif %}\
{% if message['role'] == 'user' %}{{ '<|User|>: ' + message['content'] + '\n\n' }}\
{% elif message['role'] == 'assistant' %}{{ '<|Assistant|>: ' + message['content'] + eos_token + '\n\n' }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>: ' }}{% endif %}"""


@strict
class DeepseekVL2VisionConfig(PretrainedConfig):
    """The tower is the same SigLIP in all sizes; `TOWER` of the model's module names it."""

    model_type = "vision"

    patch_size: int = 14


@strict
class DeepseekVL2ProjectorConfig(PretrainedConfig):
    model_type = "mlp_projector"

    projector_type: str = "downsample_mlp_gelu"
    input_dim: int = 1152
    n_embed: int = 2048
    depth: int = 2
    mlp_ratio: int = 1
    downsample_ratio: int = 2
    token_pooling: bool = False


@strict
class DeepseekVL2TextConfig(DeepseekOcr2TextConfig):
    """DeepSeek-MoE with plain multi-head attention, as in the tiny model."""

    model_type = "deepseek_v2"

    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        if self.mlp_layer_types is None:
            sparse = [
                layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
                for layer in range(self.num_hidden_layers)
            ]
            self.mlp_layer_types = ["sparse" if is_sparse else "dense" for is_sparse in sparse]
        super().__post_init__(**kwargs)


@strict
class DeepseekVL2LatentTextConfig(DeepseekV2Config):
    """DeepSeek-V2 with latent attention (MLA), as in the small and the base model.

    The small one's experts are chosen as DeepSeek-V2's, the base one's as DeepSeek-V3's.
    """

    model_type = "deepseek_v2"
    attribute_map: ClassVar = dict.fromkeys(("num_experts", "num_local_experts"), "n_routed_experts")  # V2's and V3's

    scoring_func: str = "softmax"

    def __post_init__(self, **kwargs: Any) -> None:
        routing = (self.topk_method, self.scoring_func)
        if routing not in (("greedy", "softmax"), ("group_limited_greedy", "softmax"), ("noaux_tc", "sigmoid")):
            raise UnsupportedModel(
                f"DeepSeek-VL2: experts are chosen by greedy and softmax, or by noaux_tc and sigmoid, found {routing}"
            )
        if self.scoring_func == "softmax" and self.norm_topk_prob:
            raise UnsupportedModel("DeepSeek-VL2: expected norm_topk_prob false where experts are chosen by softmax")
        super().__post_init__(**kwargs)

    @property
    def routes_as_v3(self) -> bool:
        return self.scoring_func == "sigmoid"


def _text(settings: dict[str, Any]) -> DeepseekVL2TextConfig | DeepseekVL2LatentTextConfig:
    """As vLLM has it: a file that does not name `kv_lora_rank` has the default of DeepSeek-V2."""
    is_latent = settings.get("kv_lora_rank", DeepseekV2Config.kv_lora_rank)
    return (DeepseekVL2LatentTextConfig if is_latent else DeepseekVL2TextConfig)(**settings)


@strict
class DeepseekVL2Config(PretrainedConfig):
    model_type = "deepseek_vl_v2"
    sub_configs: ClassVar = {
        "vision_config": DeepseekVL2VisionConfig,
        "projector_config": DeepseekVL2ProjectorConfig,
        "text_config": DeepseekVL2TextConfig,
    }
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]

    language_config: dict[str, Any] | None = None
    vision_config: dict[str, Any] | PretrainedConfig | None = None
    projector_config: dict[str, Any] | PretrainedConfig | None = None
    image_token_id: int = IMAGE_TOKENS[model_type]
    tile_tag: str = "2D"
    global_view_pos: str = "head"
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.tile_tag != "2D" or self.global_view_pos not in ("head", "tail"):
            raise UnsupportedModel(
                "DeepSeek-VL2: expected tile_tag '2D' and global_view_pos 'head' or 'tail', found "
                f"{self.tile_tag!r} and {self.global_view_pos!r}"
            )
        self.text_config = _text(self.language_config or {})
        self.vision_config = _part(DeepseekVL2VisionConfig, self.vision_config)
        self.projector_config = _part(DeepseekVL2ProjectorConfig, self.projector_config)
        kwargs.pop("text_config", None)
        if not kwargs.get("architectures"):
            kwargs["architectures"] = ["DeepseekVLV2ForCausalLM"]  # published files name none
        super().__post_init__(**kwargs)


def _part(kind: type[PretrainedConfig], settings: dict[str, Any] | PretrainedConfig | None) -> PretrainedConfig:
    if isinstance(settings, PretrainedConfig):
        return settings
    return kind(**(settings or {}))


def register() -> None:
    AutoConfig.register(DeepseekVL2Config.model_type, DeepseekVL2Config, exist_ok=True)
