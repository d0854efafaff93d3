"""Prompts with several pictures."""

from dataclasses import dataclass
from typing import Any

from PIL import Image

from tests.engine.parity import Prompt, prompts

SIZES = ((48, 96), (32, 32), (96, 64))  # rows and columns of pixels


@dataclass(frozen=True)
class Album(Prompt):
    """One question about several pictures."""

    others: tuple[Image.Image, ...] = ()

    @property
    def images(self) -> list[Image.Image]:
        return [*super().images, *self.others]

    @property
    def messages(self) -> list[dict[str, Any]]:
        (question,) = super().messages
        pictures = [Prompt(image, "").messages[0]["content"][0] for image in self.others]
        first, text = question["content"]
        return [{**question, "content": [first, *pictures, text]}]


def albums(count: int, seed: int, pictures: int = len(SIZES)) -> list[Prompt]:
    """Of one, two or three pictures each."""
    made = [prompts(count, seed + number, size) for number, size in enumerate(SIZES[:pictures])]
    return [
        Album(first.image, first.question, tuple(each.image for each in others if each.image is not None))
        for first, *others in zip(*made, strict=True)
    ]
