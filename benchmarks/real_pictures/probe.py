"""What the image tokens hold, whatever the text model makes of them: a linear read-out of a concept's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch.nn import functional as F
from transformers import LlavaForConditionalGeneration

from benchmarks.demo.packing import normalise
from benchmarks.demo.stages import image_features
from benchmarks.real.items import SPLITS
from benchmarks.real_pictures.concepts import Concept, Concepts
from benchmarks.real_pictures.drawings import drawing, picture
from benchmarks.real_pictures.icons import Role

PICTURES: Final = 2  # of every drawing
RIDGE: Final = 1e-3  # of the mean variance
SEED: Final = 9


def read_out(model: LlavaForConditionalGeneration, concepts: Concepts, asked: Sequence[Concept]) -> dict[str, float]:
    """Accuracy by split, of ridge regression to the names that is fitted to pictures by training vendors."""
    tokens_and_names = {split: mean_tokens(model, concepts, asked, split) for split in SPLITS}
    seen, names = tokens_and_names["train"]
    centre = seen.mean(0)
    spread = (seen - centre).T @ (seen - centre)
    ridge = RIDGE * spread.diagonal().mean() * torch.eye(len(spread), dtype=spread.dtype)
    weights = torch.linalg.solve(spread + ridge, (seen - centre).T @ F.one_hot(names).to(seen.dtype))
    found = {}
    for split, (tokens, wanted) in tokens_and_names.items():
        right = ((tokens - centre) @ weights).argmax(-1) == wanted
        found[split] = round(right.double().mean().item(), 3)
    return found


@torch.no_grad()
def mean_tokens(
    model: LlavaForConditionalGeneration, concepts: Concepts, asked: Sequence[Concept], role: Role
) -> tuple[torch.Tensor, torch.Tensor]:
    """For P pictures, all drawings of that role: their mean image tokens [P, d], and whose they are [P]."""
    rng = np.random.default_rng(SEED)
    drawn = [
        (number, drawing(icons, concept.name))
        for number, concept in enumerate(asked)
        for icons in concepts.drawn_by(role, concept) * PICTURES
    ]
    pixels = normalise([picture(image, rng) for _, image in drawn])
    tokens = torch.cat([image_features(model, part).mean(1) for part in pixels.split(64)])
    return tokens.double(), torch.tensor([number for number, _ in drawn])
