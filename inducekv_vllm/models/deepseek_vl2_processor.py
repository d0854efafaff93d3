# mypy: disable-error-code="misc,no-untyped-call,override,no-any-return,import-untyped"
"""How DeepSeek-VL2 cuts pictures into tiles, and how many tokens stand for each [https://arxiv.org/abs/2412.10302]."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor
from transformers import BatchFeature
from transformers.processing_utils import ProcessorMixin

from .deepseek_vl2_config import CHAT_TEMPLATE

CROPPED_PICTURES = 2  # a prompt with more has one tile of each


class DeepseekVLV2Processor(ProcessorMixin):
    """The name, and those of its settings, are those of published checkpoints.

    Args:
        candidate_resolutions: widths and heights in pixels, multiples of the first width, which is that of a tile.
        downsample_ratio: so many patches in each direction become one token.
    """

    attributes = ["tokenizer"]  # noqa: RUF012
    tokenizer_class = "AutoTokenizer"

    def __init__(
        self,
        tokenizer: Any,
        candidate_resolutions: Sequence[Sequence[int]],
        patch_size: int = 14,
        downsample_ratio: int = 2,
        image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5),
        image_token: str = "<image>",
        chat_template: str | None = None,
        **others: Any,
    ) -> None:
        self.candidate_resolutions = [(width, height) for width, height in candidate_resolutions]
        self.patch_size, self.downsample_ratio = patch_size, downsample_ratio
        self.image_mean, self.image_std, self.image_token = list(image_mean), list(image_std), image_token
        self.image_size = int(candidate_resolutions[0][0])
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        if not isinstance(tokenizer.get_vocab().get(image_token), int):
            raise ValueError(f"the tokenizer has no token {image_token!r}")
        self.picture_mark = image_token
        tokenizer.chat_template = chat_template or tokenizer.chat_template or CHAT_TEMPLATE
        super().__init__(tokenizer, chat_template=tokenizer.chat_template)

    @property
    def model_input_names(self) -> list[str]:
        return ["input_ids", "attention_mask", "pixel_values", "pixel_values_local", "num_local_patches"]

    def __call__(self, images: Sequence[Image.Image] | None = None, text: Any = None, **options: Any) -> BatchFeature:
        """The tokens of one prompt and its tiles.

        Args:
            images: in the order of their marks in the prompt.
            text: the prompt, or a list of it.

        Raises:
            ValueError: there are more prompts than one, or more or fewer marks than pictures.
        """
        (prompt,) = [text] if isinstance(text, str) else text
        pictures = list(images or [])
        if prompt.count(self.image_token) != len(pictures):
            raise ValueError(f"the prompt has {prompt.count(self.image_token)} pictures, found {len(pictures)}")
        sizes = [self.tiled_size(picture.size, of=len(pictures)) for picture in pictures]
        counts = iter([self.num_tokens(*size) for size in sizes])
        expanded = re.sub(re.escape(self.image_token), lambda _: self.image_token * next(counts), prompt)
        options.pop("return_tensors", None)
        data = dict(self.tokenizer([expanded], return_tensors="pt", return_token_type_ids=False, **options))
        if pictures:
            pairs = list(zip(pictures, sizes, strict=True))
            data["pixel_values"] = torch.stack(
                [self._pixels(picture, self.image_size, self.image_size) for picture in pictures]
            )
            data["pixel_values_local"] = torch.cat([self._tiles(picture, *size) for picture, size in pairs])
            data["num_local_patches"] = torch.tensor(sizes) // self.image_size  # [pictures, 2]: columns, rows
        return BatchFeature(data)

    def tiled_size(self, size: tuple[int, int], *, of: int) -> tuple[int, int]:
        """Width and height in pixels to which a picture is padded before it is cut into tiles.

        Of the candidates the one that keeps most pixels; of equals that with the fewest of padding.

        Args:
            size: width and height of the picture.
            of: pictures in the prompt.
        """
        if of > CROPPED_PICTURES:
            return self.image_size, self.image_size
        width, height = size

        def worth(candidate: tuple[int, int]) -> tuple[int, int]:
            scale = min(candidate[0] / width, candidate[1] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - candidate[0] * candidate[1]

        return max(self.candidate_resolutions, key=worth)

    def num_tokens(self, width: int, height: int) -> int:
        """The tokens of a picture that is padded to this size: those of the whole, a separator, those of its tiles."""
        side = -(-(self.image_size // self.patch_size) // self.downsample_ratio)
        columns, rows = width // self.image_size, height // self.image_size
        return side * (side + 1) + 1 + rows * side * (columns * side + 1)

    def _pixels(self, picture: Image.Image, width: int, height: int) -> Tensor:
        """[3, height, width] float32."""
        grey: Any = tuple(int(value * 255) for value in self.image_mean)
        pixels = pil_to_tensor(ImageOps.pad(picture, (width, height), color=grey)).float() / 255
        mean, std = (torch.tensor(values)[:, None, None] for values in (self.image_mean, self.image_std))
        return (pixels - mean) / std

    def _tiles(self, picture: Image.Image, width: int, height: int) -> Tensor:
        """[tiles, 3, image size, image size], row by row."""
        size = self.image_size
        pixels = self._pixels(picture, width, height)
        rows = pixels.unflatten(2, (-1, size)).unflatten(1, (-1, size))  # [3, rows, size, columns, size]
        return rows.permute(1, 3, 0, 2, 4).flatten(0, 1)
