"""Placeholder tokens, which a prompt holds in place of images, videos and audio."""

from typing import Any

from ..models import IMAGE_TOKENS

# The names that Hugging Face configurations give to these token ids.
_CONFIG_NAMES = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id")


def placeholder_ids(config: Any) -> frozenset[int]:
    """Return the placeholder token ids of a `PretrainedConfig`; empty for a text-only model."""
    tokens = (getattr(config, name, None) for name in _CONFIG_NAMES)
    named = frozenset(token for token in tokens if isinstance(token, int))
    unnamed = IMAGE_TOKENS.get(getattr(config, "model_type", ""))
    return named or frozenset([] if unnamed is None else [unnamed])
