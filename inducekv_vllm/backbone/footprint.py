"""The memory footprint in bytes (paper, Eq. bytes_per_entry).

Shapes: B entries, m payload tokens, L layers, J KV heads, D head size, V size of a head's values, d hidden size.
"""

from collections.abc import Mapping
from typing import Any

from ..errors import UnsupportedModel

FLOAT16_BYTES = 2
PROTOTYPES, PROTOTYPES_A_TASK = 32, 6  # of a relevance gate's layer: at least, and for each task
# Keys of the language model's part in a wrapper configuration: LLaVA and Qwen-VL; DeepSeek-VL2; InternVL.
TEXT_CONFIG_KEYS = ("text_config", "language_config", "llm_config")


def footprint_bytes(
    B: int, d: int, L: int, J: int, m: int, D: int, V: int | None = None, payload_bytes: int = FLOAT16_BYTES
) -> int:
    """Bytes of B entries: a retrieval key [d] in float16, keys [L, J, m, D] and values [L, J, m, V].

    V is D if it is None, as in all models but those of latents: that is the paper's B (2d + 4LJmD).

    Args:
        payload_bytes: of a number of the keys and values.
    """
    return B * (FLOAT16_BYTES * d + payload_bytes * L * J * m * (D + (D if V is None else V)))


def prototypes_of(num_tasks: int) -> int:
    """Of each layer of the gate that the selector fits to so many tasks."""
    return max(PROTOTYPES, PROTOTYPES_A_TASK * num_tasks)


def size(text: Mapping[str, Any], name: str) -> int:
    """A size of a parsed configuration. Raises UnsupportedModel: it is missing or not a positive whole number."""
    value = text.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(
            f"the text configuration (model_type {text.get('model_type')!r}) must state {name} "
            f"as a positive whole number, found {value!r}"
        )
    return value
