"""A question as the model takes it, with its pictures in the style that it is shown in."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from PIL import Image

from inducekv_vllm.files.picture import decoded

from ..backbone.model import Backbone, Inputs
from .fitting_set import GateQuestion
from .variations import STYLES

PIXELS_KEPT: Final = 2**27  # of decoded pictures, 512 MB; photographs as phones save them have 12 million each


def encode_questions(
    backbone: Backbone,
    questions: Iterable[GateQuestion],
    styles: Mapping[str, Callable[[Image.Image], Image.Image]] = STYLES,
) -> list[Inputs]:
    """Each question encoded; a picture that several have is decoded once while there is room to keep it.

    Raises:
        TaskDataError: the model's processor refuses a question.
    """
    kept: dict[tuple[Path, str | None], Image.Image] = {}

    def picture(path: Path, style: str | None) -> Image.Image:
        if (found := kept.get((path, style))) is not None:
            return found
        made = decoded(path.read_bytes()) if style is None else styles[style](picture(path, None))
        if sum(each.width * each.height for each in (made, *kept.values())) <= PIXELS_KEPT:
            kept[path, style] = made
        return made

    return [backbone.encode(q.messages, [picture(path, q.style) for path in q.images]) for q in questions]
