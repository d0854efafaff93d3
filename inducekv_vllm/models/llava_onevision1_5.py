# mypy: disable-error-code="misc,no-untyped-call,assignment,union-attr,no-any-return,override,arg-type"
"""LLaVA-OneVision-1.5 for transformers [https://arxiv.org/abs/2509.23661]: what it has that Qwen2.5-VL has not.

The tower is RICE-ViT [https://arxiv.org/abs/2507.20025]: it puts a class token before each picture's patches, with a
rotation of its own, and takes it away before the patches are merged. The text model is a plain Qwen3.

Shapes: P patches of all pictures, N pictures or frames, d hidden size of the tower, D head size of the tower.
"""

# Without annotations from __future__: transformers reads the class of `config` from them.
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor, Qwen2_5_VLProcessor
from transformers.activations import ACT2FN
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen
from transformers.vision_utils import get_vision_attention_seqlens, get_vision_position_ids

from .llava_onevision1_5_config import LlavaOnevision15Config, RiceConfig


class RicePatchEmbed(nn.Module):
    def __init__(self, config: RiceConfig) -> None:
        super().__init__()
        self.shape = (-1, config.in_channels, config.patch_size, config.patch_size)
        self.proj = nn.Conv2d(
            config.in_channels, config.hidden_size, config.patch_size, stride=config.patch_size, bias=False
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """[P, d] from pixels [P, channels x patch size x patch size]."""
        patches: Tensor = self.proj(pixels.view(self.shape).to(self.proj.weight.dtype))
        return patches.flatten(1)


class RiceMLP(nn.Module):
    def __init__(self, config: RiceConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = ACT2FN[config.hidden_act]

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.fc2(self.act(self.fc1(hidden)))
        return projected


class RiceBlock(qwen.Qwen2_5_VLVisionBlock):
    def __init__(self, config: RiceConfig) -> None:
        super().__init__(config)
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.norm2 = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp = RiceMLP(config)


class LlavaOnevision15PreTrainedModel(qwen.Qwen2_5_VLPreTrainedModel):
    config: LlavaOnevision15Config
    _no_split_modules: ClassVar = ["RiceBlock", "Qwen3DecoderLayer"]


class RiceModel(LlavaOnevision15PreTrainedModel):
    """The vision tower."""

    config: RiceConfig
    _input_embed_layer = "patch_embed"
    _can_record_outputs: ClassVar = {}

    def __init__(self, config: RiceConfig) -> None:
        super().__init__(config)
        self.spatial_merge_size = config.spatial_merge_size
        self.patch_embed = RicePatchEmbed(config)
        self.rotary_pos_emb = qwen.Qwen2_5_VLVisionRotaryEmbedding(config)
        self.class_embedding = nn.Parameter(torch.zeros(config.hidden_size))
        self.class_pos_emb = nn.Parameter(torch.zeros(1, config.hidden_size // config.num_heads // 2))
        self.pre_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.blocks = nn.ModuleList(RiceBlock(config) for _ in range(config.depth))
        self.merger = qwen.Qwen2_5_VLPatchMerger(config.text_hidden_size, config.hidden_size, config.spatial_merge_size)
        self.merger.ln_q = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.post_init()

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> BaseModelOutputWithPooling:
        """Patches [P, d] and their merged features.

        Args:
            hidden_states: pixels, as `RicePatchEmbed` takes them.
            grid_thw: [pictures and videos, 3]: frames, rows and columns of patches.
        """
        kwargs.pop("return_dict", None)
        positions = get_vision_position_ids(grid_thw, self.spatial_merge_size, kwargs=kwargs)
        ends, longest = get_vision_attention_seqlens(grid_thw, self.config, kwargs=kwargs)  # ends: [N + 1], from 0
        patches = self.patch_embed(hidden_states)  # [P, d]
        cos, sin = self.rotary_pos_emb(patches, positions)  # [P, D] each
        ends = ends + torch.arange(len(ends), device=ends.device, dtype=ends.dtype)
        is_class = torch.zeros(len(patches) + len(ends) - 1, dtype=torch.bool, device=patches.device)  # [P + N]
        is_class[ends[:-1].long()] = True
        angles = torch.cat([self.class_pos_emb, self.class_pos_emb], dim=-1).float()  # [1, D]
        hidden = self.pre_layernorm(_with_class(is_class, patches, self.class_embedding))
        rotation = _with_class(is_class, cos, angles.cos()), _with_class(is_class, sin, angles.sin())
        for block in self.blocks:
            hidden = block(
                hidden,
                cu_seqlens=ends,
                max_seqlen=None if longest is None else longest + 1,
                position_embeddings=rotation,
                **kwargs,
            )
        hidden = hidden[~is_class]  # [P, d]
        return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=self.merger(hidden))


def _with_class(is_class: Tensor, of_patches: Tensor, of_class: Tensor) -> Tensor:
    """[P + N, ...]: the values of patches [P, ...], and those of the class token where `is_class` [P + N] says."""
    joined = of_patches.new_empty(len(is_class), of_patches.shape[-1])
    joined[~is_class], joined[is_class] = of_patches, of_class.to(of_patches.dtype)
    return joined


class LlavaOnevision15Model(qwen.Qwen2_5_VLModel):
    config: LlavaOnevision15Config
    get_rope_index = None

    def __init__(self, config: LlavaOnevision15Config) -> None:
        LlavaOnevision15PreTrainedModel.__init__(self, config)
        self.visual = RiceModel._from_config(config.vision_config)
        self.language_model = AutoModel.from_config(config.text_config)
        self.rope_deltas = None
        self.post_init()

    def compute_3d_position_ids(self, **kwargs: Any) -> None:
        """None: Qwen3 counts tokens."""


class LLaVAOneVision1_5_ForConditionalGeneration(qwen.Qwen2_5_VLForConditionalGeneration):
    """The name is that of published checkpoints."""

    config: LlavaOnevision15Config

    def __init__(self, config: LlavaOnevision15Config) -> None:
        LlavaOnevision15PreTrainedModel.__init__(self, config)
        self.model = LlavaOnevision15Model(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        return inputs | {"position_ids": None}

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        # Qwen2.5-VL's would be three-dimensional.
        return super(qwen.Qwen2_5_VLForConditionalGeneration, self)._prepare_position_ids_for_generation(
            *args, **kwargs
        )


def register() -> None:
    AutoModel.register(RiceConfig, RiceModel, exist_ok=True)
    AutoModel.register(LlavaOnevision15Config, LlavaOnevision15Model, exist_ok=True)
    AutoModelForImageTextToText.register(
        LlavaOnevision15Config, LLaVAOneVision1_5_ForConditionalGeneration, exist_ok=True
    )
    AutoProcessor.register(LlavaOnevision15Config, Qwen2_5_VLProcessor, exist_ok=True)
    # Published weights are named `visual.*`, `model.*` (the text model's) and `lm_head.weight`.
    register_checkpoint_conversion_mapping(
        LlavaOnevision15Config.model_type,
        [
            WeightRenaming(source_patterns=r"^visual", target_patterns="model.visual"),
            WeightRenaming(
                source_patterns=r"^model(?!\.(language_model|visual))", target_patterns="model.language_model"
            ),
        ],
        overwrite=True,
    )
