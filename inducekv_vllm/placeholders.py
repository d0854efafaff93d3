"""Which tokens of a prompt are text, and which stand for a part of a picture, a video or a sound."""

from __future__ import annotations

from typing import Any

# What Hugging Face configurations call the token that every patch of a picture, and so on, takes the place of.
_CONFIG_NAMES = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")


def placeholder_ids(config: Any) -> frozenset[int]:
    """The placeholder tokens of a model's configuration (a `PretrainedConfig`); empty for a model of text alone."""
    found = (getattr(config, name, None) for name in _CONFIG_NAMES)
    return frozenset(token for token in found if isinstance(token, int))
