# mypy: disable-error-code="misc,no-untyped-call,assignment,no-any-return,override,arg-type,union-attr,operator"
"""DeepSeek-VL2 for transformers [https://arxiv.org/abs/2412.10302].

The language model is transformers' own: of the tiny model that of DeepSeek-OCR-2, with plain attention heads; of the
small and the base model DeepSeek-V2, with latents. The base model's experts are chosen as in DeepSeek-V3. The tower is
timm's SigLIP. All are what vLLM computes.

Shapes: N pictures, t tiles of all pictures, P patches of a tile, w rows and columns of a tile's projected features,
d hidden size of the language model, D of the tower.
"""

# Without annotations from __future__: transformers reads the class of `config` from them.
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForImageTextToText, AutoProcessor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.deepseek_ocr2 import modeling_deepseek_ocr2 as ocr
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Model, DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from ..errors import UnsupportedModel
from .deepseek_vl2_config import DeepseekVL2Config, DeepseekVL2LatentTextConfig, DeepseekVL2ProjectorConfig
from .deepseek_vl2_processor import DeepseekVLV2Processor

TOWER = "vit_so400m_patch14_siglip_384.webli"


def make_tower() -> nn.Module:
    """The tower, untrained.

    Raises:
        UnsupportedModel: the package timm is missing.
    """
    try:
        import timm
    except ImportError as error:
        raise UnsupportedModel("DeepSeek-VL2's tower needs the package timm: `pip install timm`") from error
    tower: nn.Module = timm.create_model(
        TOWER, pretrained=False, num_classes=0, dynamic_img_size=True, dynamic_img_pad=True
    )
    return tower


class Projector(nn.Module):
    """Joins squares of patches, and maps them to the language model's size."""

    def __init__(self, config: DeepseekVL2ProjectorConfig) -> None:
        super().__init__()
        if config.projector_type != "downsample_mlp_gelu" or config.token_pooling:
            raise UnsupportedModel(
                "DeepSeek-VL2: expected the projector 'downsample_mlp_gelu' without token pooling, found "
                f"{config.projector_type!r}"
            )
        self.ratio = config.downsample_ratio
        inner = config.n_embed * config.mlp_ratio
        sizes = [config.input_dim * self.ratio**2, *[inner] * (config.depth - 1), config.n_embed]
        maps = [nn.Linear(*pair) for pair in pairwise(sizes)]
        self.layers = nn.Sequential(*[layer for each in maps for layer in (each, nn.GELU())][:-1])

    def forward(self, patches: Tensor) -> Tensor:
        """[t, w, w, d] from patches [t, P, D]."""
        side = int(patches.shape[1] ** 0.5)
        grid = patches.transpose(1, 2).unflatten(2, (side, side))  # [t, D, side, side]
        missing = -side % self.ratio
        grid = nn.functional.pad(grid, (0, missing, 0, missing))
        squares = nn.functional.unfold(grid, self.ratio, stride=self.ratio).transpose(1, 2)  # [t, w * w, D * ratio^2]
        side = (side + missing) // self.ratio
        projected: Tensor = self.layers(squares)
        return projected.unflatten(1, (side, side))


def make_language_model(config: Any) -> nn.Module:
    if not isinstance(config, DeepseekVL2LatentTextConfig):
        return ocr.DeepseekOcr2TextModel(config)
    language_model = DeepseekV2Model(config)
    for layer in language_model.layers:
        if config.routes_as_v3 and isinstance(layer.mlp, DeepseekV2Moe):
            layer.mlp.gate = DeepseekV3TopkRouter(config)
    return language_model


class DeepseekVL2PreTrainedModel(ocr.DeepseekOcr2PreTrainedModel):
    config: DeepseekVL2Config
    _no_split_modules: ClassVar = ["DeepseekOcr2TextDecoderLayer", "DeepseekV2DecoderLayer"]
    _keep_in_fp32_modules_strict: ClassVar = []


class DeepseekVL2Model(ocr.DeepseekOcr2Model):
    config: DeepseekVL2Config

    def __init__(self, config: DeepseekVL2Config) -> None:
        DeepseekVL2PreTrainedModel.__init__(self, config)
        width = config.projector_config.n_embed
        self.vision = make_tower()
        self.projector = Projector(config.projector_config)
        self.image_newline = nn.Parameter(torch.randn(width) / width**0.5)
        self.view_separator = nn.Parameter(torch.randn(width) / width**0.5)
        self.language_model = make_language_model(config.text_config)
        self.post_init()

    def get_image_features(
        self,
        pixel_values: Tensor,
        pixel_values_local: Tensor | None = None,
        num_local_patches: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """What stands in place of each picture's tokens: rows of features, each ended by a new line.

        Args:
            pixel_values: [N, 3, height, width]: of each picture the whole.
            pixel_values_local: [t - N, 3, height, width]: its tiles, row by row.
            num_local_patches: [N, 2]: columns and rows of tiles.
        """
        assert pixel_values_local is not None
        assert num_local_patches is not None
        tiles = torch.cat([pixel_values, pixel_values_local]).to(self.image_newline.dtype)  # [t, 3, height, width]
        features = self.projector(self.vision.forward_features(tiles))  # [t, w, w, d]
        shapes = [(rows, columns) for columns, rows in num_local_patches.tolist()]
        whole, tiled = features[: len(shapes)], features[len(shapes) :].split([rows * of for rows, of in shapes])
        pictures = []
        for view, local, (rows, columns) in zip(whole, tiled, shapes, strict=True):
            grid = (
                local.unflatten(0, (rows, columns)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
            )  # [rows w, columns w, d]
            views = [self._lines(view), self._lines(grid)]
            first, second = views if self.config.global_view_pos == "head" else views[::-1]
            pictures.append(torch.cat([first, self.view_separator[None], second]))
        return BaseModelOutputWithPooling(last_hidden_state=features, pooler_output=pictures)

    def _lines(self, grid: Tensor) -> Tensor:
        """[rows x (columns + 1), d] from features [rows, columns, d]."""
        return torch.cat([grid, self.image_newline.expand(len(grid), 1, -1)], dim=1).flatten(0, 1)


class DeepseekVLV2ForCausalLM(ocr.DeepseekOcr2ForConditionalGeneration):
    """The name is that of published checkpoints."""

    config: DeepseekVL2Config

    def __init__(self, config: DeepseekVL2Config) -> None:
        DeepseekVL2PreTrainedModel.__init__(self, config)
        self.model = DeepseekVL2Model(config)
        self.lm_head = nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


def register() -> None:
    AutoModel.register(DeepseekVL2Config, DeepseekVL2Model, exist_ok=True)
    AutoModelForImageTextToText.register(DeepseekVL2Config, DeepseekVLV2ForCausalLM, exist_ok=True)
    AutoProcessor.register(DeepseekVL2Config, DeepseekVLV2Processor, exist_ok=True)
    parts = ("vision", "projector", "image_newline")
    register_checkpoint_conversion_mapping(
        DeepseekVL2Config.model_type,
        [
            *[WeightRenaming(source_patterns=rf"^{part}", target_patterns=f"model.{part}") for part in parts],
            WeightRenaming(source_patterns="^view_seperator", target_patterns="model.view_separator"),  # so published
            WeightRenaming(source_patterns=r"^language\.model\.", target_patterns="model.language_model."),
            WeightRenaming(source_patterns=r"^language\.lm_head\.", target_patterns="lm_head."),
        ],
        overwrite=True,
    )
