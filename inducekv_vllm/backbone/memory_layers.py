"""The layers of a language model that memory fits: those with attention. A hybrid has others, which keep a state.

Everywhere else a layer's number is its place among these: in a bundle's tensors, in the pool, in a gate's layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ..errors import UnsupportedModel

WITH_ATTENTION: Final = frozenset(
    {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "indexed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "minimax_m3_sparse",
        "hybrid",  # attention and a state in one layer
        "hybrid_sliding",
    }
)
WITHOUT_ATTENTION: Final = frozenset({"linear_attention", "conv", "recurrent", "moe", "mlp"})
_EARLIER_NAMES: Final = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}


def layer_kinds(text: Any) -> list[str] | None:
    """The kind of every layer, as transformers names them; None if the configuration does not tell layers apart."""
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    return None if kinds is None else [_EARLIER_NAMES.get(kind, kind) for kind in kinds]


def memory_layers(text: Any) -> tuple[int, ...]:
    """The numbers of the decoder layers with attention, ascending, of a language model's configuration.

    Raises:
        UnsupportedModel: no layer has attention, one is of an unknown kind, or there are not as many kinds as layers.
    """
    return layers_with_attention(layer_kinds(text), text.num_hidden_layers)


def layers_with_attention(kinds: Sequence[str] | None, num_layers: int) -> tuple[int, ...]:
    """See `memory_layers`; the kinds are those of `layer_kinds`."""
    if kinds is None:
        return tuple(range(num_layers))
    if len(kinds) != num_layers:
        raise UnsupportedModel(f"layer_types names the kinds of {len(kinds)} layers, and the model has {num_layers}")
    for number, kind in enumerate(kinds):
        if kind not in WITH_ATTENTION | WITHOUT_ATTENTION:
            raise UnsupportedModel(f"layer_types has the unknown kind {kind!r}, of layer {number}")
    found = tuple(number for number, kind in enumerate(kinds) if kind in WITH_ATTENTION)
    if not found:
        raise UnsupportedModel(
            f"memory needs layers with attention, found layer_types with {', '.join(sorted(set(kinds)))} alone"
        )
    return found
