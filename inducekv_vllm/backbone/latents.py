"""Multi-head latent attention (MLA): one latent and one rotated key of a token for all heads, as its KV cache has them.

A memory token is the same: a key [latent ; part that RoPE rotates], and a value, which is a latent alone.
"""

from typing import Any


def is_latent(text: Any) -> bool:
    return bool(getattr(text, "kv_lora_rank", None))


def key_size(text: Any) -> int:
    """D of a memory token: the latent and the rotated part."""
    return int(text.kv_lora_rank + text.qk_rope_head_dim)


def value_size(text: Any) -> int:
    """V of a memory token: the latent."""
    return int(text.kv_lora_rank)
