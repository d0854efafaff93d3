"""What a gate sees of a prompt: some layers' attention values of the tokens that decide.

The forward pass ends at the last of these layers. Shapes: n prompts, T tokens, t of them deciding, S layers, F = J D
features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor

from inducekv_vllm.gate import TurnMarks, deciding_positions
from inducekv_vllm.placeholders import placeholder_ids

from ..backbone.model import Backbone, Inputs
from ..data.examples import decode_image
from .fitting_set import GateQuestion

STYLES: Final[Mapping[str, Callable[[Image.Image], Image.Image]]] = {
    "inverted": ImageOps.invert,
    "grey": lambda picture: ImageOps.grayscale(picture).convert("RGB"),
    "mirrored": ImageOps.mirror,
    "blurred": lambda picture: picture.filter(ImageFilter.GaussianBlur(max(picture.size) / 40)),
    "tinted": lambda picture: Image.blend(picture, Image.new("RGB", picture.size, (250, 190, 80)), 0.4),
}


def layers_of_gate(num_layers: int) -> tuple[int, ...]:
    """The layers whose values a gate looks at: the first knows a token alone, the other one what stands before it."""
    return tuple(dict.fromkeys((0, num_layers // 5)))


@torch.no_grad()
def token_values(
    backbone: Backbone,
    questions: Sequence[GateQuestion],
    layers: Sequence[int],
    marks: TurnMarks,
    *,
    batch_tokens: int = 2048,
) -> list[Tensor]:
    """The values [t, S, F] of each prompt, float16.

    Args:
        batch_tokens: of a batch, with its padding, at most; a longer prompt is a batch of its own.
    """
    placeholders = placeholder_ids(backbone.model.config)
    pictures: dict[tuple[Any, str | None], Image.Image] = {}
    encoded = [_encode(backbone, question, pictures) for question in questions]
    lengths = [inputs["input_ids"].shape[1] for inputs in encoded]
    found: list[Tensor] = [torch.empty(0)] * len(questions)
    for rows in _batches(lengths, batch_tokens):
        values = _values(backbone, backbone.collate([encoded[row] for row in rows]), layers)  # [n, T, S, F]
        for row, of_prompt in zip(rows, values, strict=True):
            ids = encoded[row]["input_ids"][0].tolist()
            found[row] = of_prompt[deciding_positions(ids, marks, placeholders)].half()
    return found


class _Enough(Exception):
    """Ends a forward pass."""


def _values(backbone: Backbone, inputs: Inputs, layers: Sequence[int]) -> Tensor:
    """The layers' attention values [n, T, S, F], not rotated."""
    kept: list[Tensor] = []

    def keep(module: torch.nn.Module, arguments: Any, output: Tensor) -> None:
        kept.append(output)
        if len(kept) == len(layers):
            raise _Enough

    modules: list[Any] = backbone.attention_layers()
    handles = [modules[layer].v_proj.register_forward_hook(keep) for layer in layers]
    try:
        backbone.hidden_states(inputs)
    except _Enough:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(kept, dim=2)


def _encode(backbone: Backbone, question: GateQuestion, pictures: dict[tuple[Any, str | None], Image.Image]) -> Inputs:
    shown = []
    for path in question.images:
        key = path, question.style
        if key not in pictures:
            picture = decode_image(path.read_bytes())
            pictures[key] = STYLES[question.style](picture) if question.style else picture
        shown.append(pictures[key])
    return backbone.encode(question.messages, shown)


def _batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Rows of about one length together."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and (len(batches[-1]) + 1) * lengths[row] <= batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches
