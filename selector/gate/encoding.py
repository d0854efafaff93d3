"""A question as the model takes it, with its pictures in the style that it is shown in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from PIL import Image

from ..backbone.model import Backbone, Inputs
from ..data.examples import decode_image
from .fitting_set import GateQuestion
from .variations import STYLES


def encode_questions(
    backbone: Backbone,
    questions: Iterable[GateQuestion],
    styles: Mapping[str, Callable[[Image.Image], Image.Image]] = STYLES,
) -> list[Inputs]:
    """Each question encoded; a picture that several have is decoded once.

    Raises:
        TaskDataError: the model's processor refuses a question.
    """
    shown: dict[tuple[Path, str | None], Image.Image] = {}

    def picture(path: Path, style: str | None) -> Image.Image:
        if (path, style) not in shown:
            decoded = decode_image(path.read_bytes())
            shown[path, style] = decoded if style is None else styles[style](decoded)
        return shown[path, style]

    return [backbone.encode(q.messages, [picture(path, q.style) for path in q.images]) for q in questions]
